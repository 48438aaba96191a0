"""./train_gpt's options, closing lines and traces: for the reports of dev/bench and dev/chapter."""
import re


def flags(options):
    """The command line of {name: value}."""
    return [text for name, value in options.items() for text in ("--" + name.replace("_", "-"), str(value))]


def printed_bytes(output, words):
    """Bytes that are printed before these words, such as 33.10 GB; None if the words are not there."""
    found = re.search(f"([0-9.]+) (B|kB|MB|GB|TB) {words}", output)
    return float(found[1]) * 1000 ** ["B", "kB", "MB", "GB", "TB"].index(found[2]) if found else None


def trace_steps(trace):
    """The kernels of a --trace in order, as a list of steps: a step begins where another pass follows update."""
    events = trace["traceEvents"]
    rows = {event["args"]["name"]: event["tid"] for event in events if event.get("name") == "thread_name"}
    kernels = [event for event in events if event["ph"] == "X" and event["tid"] == rows.get("stream: kernels")]
    steps, last = [], "update"
    for event in sorted(kernels, key=lambda event: event["ts"]):
        if last == "update" and event["args"]["pass"] != "update":
            steps.append([])
        last = event["args"]["pass"]
        steps[-1].append(event)
    return steps
