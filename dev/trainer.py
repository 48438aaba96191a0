"""Options, closing lines and traces of ./train_gpt, for the reports of dev/bench and dev/playbook."""
import re


# Options of a run that is measured: no validation, samples or checkpoints.
BARE = {"schedule": "constant", "val_fraction": 0, "eval_every": 0, "sample_every": 0, "checkpoint_every": 0}


def flags(options):
    """Returns the options {name: value} as a command line."""
    return [text for name, value in options.items() for text in ("--" + name.replace("_", "-"), str(value))]


def printed_bytes(output, words):
    """Returns the bytes that are printed before `words`, such as 33.10 GB, or None if `words` do not occur."""
    found = re.search(f"([0-9.]+) (B|kB|MB|GB|TB) {words}", output)
    return float(found[1]) * 1000 ** ["B", "kB", "MB", "GB", "TB"].index(found[2]) if found else None


def trace_steps(trace):
    """Returns the kernels of a --trace as a list of steps. A step begins where another pass follows update."""
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
