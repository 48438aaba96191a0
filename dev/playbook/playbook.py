#!/usr/bin/env python3
"""Compares the claims of the Ultra-Scale Playbook with measurements on this machine and writes one HTML page: a
summary; for each part its claims with verdicts, a figure, tables and the commands that ran.

    make playbook
    python3 dev/playbook/playbook.py --train-gpt ./train_gpt --out runs/playbook [--quick]
    python3 dev/playbook/playbook.py --results data/playbook.json       the page of an earlier run
"""
import argparse
import base64
import html
import json
import os
import sys
from pathlib import Path

from measure import SECTIONS, Failed, fail, measure, read_json
try:
    from figures import html_table, number, plural, pyplot
except ImportError as error:
    sys.exit(f"playbook: {error}: pip install matplotlib, or apt install python3-matplotlib")
import parts_batch
import parts_formats
import parts_parallel
import parts_single

# On a phone a figure is wider than the page and scrolls in its box, as its type would be too small.
STYLE = """
body { font: 16px/1.55 Georgia, serif; color: #222; max-width: 1080px; margin: 2em auto; padding: 0 1.2em; }
h1, h2, th, td, figcaption, summary, pre { font-family: system-ui, sans-serif; }
h1 { margin-bottom: .2em } h2 { margin-top: 2.4em; border-top: 1px solid #ddd; padding-top: .8em }
figure { margin: 1em 0; } figcaption { font-size: 13px; color: #555; } img { width: 100%; }
table { border-collapse: collapse; font-size: 13px; margin: .8em 0; } .scroll { overflow-x: auto; }
@media (max-width: 900px) { figcaption::before { content: "Wide figures scroll sideways. "; font-weight: 600; } }
th, td { padding: .3em .65em; border-bottom: 1px solid #e3e3e3; text-align: right; vertical-align: top; }
th { background: #f5f5f3; font-weight: 600; min-width: 4em; } td { white-space: nowrap; }
.claims td { white-space: normal; } .claims td:last-child { font-weight: 600; }
th:first-child, td:first-child, .claims td, .claims th { text-align: left; }
@media (max-width: 600px) { .claims tr:first-child { display: none; } .claims td { display: block; border: 0; }
    .claims tr { display: block; border-top: 1px solid #ccc; } .claims td:first-child { font-weight: 600; }
    .claims td:nth-child(2)::before { content: "playbook: "; } .claims td:nth-child(3)::before { content: "here: "; } }
details { margin: .6em 0; } summary { font-size: 13px; color: #555; cursor: pointer; }
pre { font-family: monospace; font-size: 11.5px; background: #f7f7f5; padding: .8em; white-space: pre-wrap; }
.facts, .source, nav { font-family: system-ui, sans-serif; font-size: 14px; color: #444; }
nav ol { columns: 2 20em; padding-left: 1.6em; } .source { margin-top: -.6em; }
"""
PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>The Playbook's claims, on {device}</title>
<style>{style}</style></head><body>
<h1>The Playbook's claims, on this machine</h1>
<p class=facts>{facts}</p>
<p>This page compares statements of the <a href="{playbook}">Ultra-Scale Playbook</a> with what <code>./train_gpt</code>
does here: training on one GPU, then data and tensor parallelism and formats of 16 and 8 bits. <em>Planned</em> values
come from <code>./train_gpt plan</code>, which computes exactly what a run allocates. A percentage with a sign is a
difference from the value that the claim names. <em>Measured</em> values come from runs on the device above. A
verdict on repeated measurements is <em>no conclusion</em> if their range is larger than the distance of their median
from no effect. In figures a red dashed line shows the playbook's value.</p>
<nav><ol>{contents}</ol></nav>
<h2 id=summary>Summary</h2>
{summary}
{parts}
</body></html>
"""
PLAYBOOK = "https://huggingface.co/spaces/nanotron/ultrascale-playbook"
SOURCES = {     # the playbook's section for each part; its address is the title in lower case
    "batch_size": "First steps: training on one GPU",
    "state": "Memory usage in Transformers", "activations": "Activations memory",
    "timeline": "Profiling the memory usage", "recomputation": "Activation recomputation",
    "accumulation": "Gradient accumulation", "data_parallel": "Data parallelism",
    "tensor_parallel": "Tensor parallelism", "formats": "Mixed precision training",
    "failures": "FP16 and BF16 training", "fp8_quality": "FP8 pretraining"}


def drawn(name, results, about):
    """Returns the Section of one part."""
    module = next(part for part in (parts_batch, parts_single, parts_parallel, parts_formats) if hasattr(part, name))
    return getattr(module, name)(results, about)


def facts(results):
    about, model = results["about"], results["about"]["model"]
    rounds = results["recomputation"]["results"]["modes"]["none"]["round_ms"]
    cuda = f"CUDA {about['cuda_runtime'] // 1000}.{about['cuda_runtime'] % 1000 // 10}, cuBLASLt {about['cublaslt']}"
    lines = [f"Device: {about['device']}, {cuda if about['gpu'] else plural(about['cpus'], 'CPU')}. {about['build']}. "
             f"MFU is relative to {number(about['peak_flops'] / 1e12)} TFLOP/s ({about['peak_source']}).",
             f"Date: {about['date']}; {about['seconds']:.0f} s" + (", --quick" if about["quick"] else "") + ".",
             f"Model of the measured runs: {model['layers']} layers, {model['heads']} heads, {model['channels']} "
             f"channels, vocabulary {model['vocab']} (bytes): {model['parameters']:,} parameters; micro-batch "
             f"{about['micro_batch']} × {about['seq_len']:,} tokens unless stated otherwise.",
             f"Noise: the same run took {number(min(rounds))} to {number(max(rounds))} ms in {len(rounds)} rounds."]
    return "<br>".join(html.escape(line) for line in lines)


def claims_html(claims):
    return f'<div class=claims>{html_table(["claim", "playbook", "here", "verdict"], claims)}</div>' if claims else ""


def part_html(number_, name, section, commands, folder):
    """Returns one part of the page; writes its figure to the folder."""
    title, source = html.escape(section.title), SOURCES[name]
    body = [f"<h2 id=s{number_}>{number_}. {title}</h2>",
            f'<p class=source>In the playbook: <a href="{PLAYBOOK}?section={source.lower().replace(" ", "_")}">{source}'
            "</a></p>", claims_html(section.claims)]
    if section.figure:
        path = folder / f"{number_}_{name}.png"
        section.figure.savefig(path)
        inches = section.figure.get_figwidth()
        pyplot.close(section.figure)
        data = base64.b64encode(path.read_bytes()).decode()
        width = f"min-width: {85 * inches:.0f}px; max-width: {104 * inches:.0f}px"
        image = f'<img style="{width}" alt="{title}" src="data:image/png;base64,{data}">'
        body.append(f"<figure><div class=scroll>{image}</div>"
                    f"<figcaption>{html.escape(section.caption)}</figcaption></figure>")
    body += [f"<p>{html.escape(text)}</p>" for text in section.texts]
    body.append(section.tables)
    if commands:
        body.append(f"<details><summary>{plural(len(commands), 'command')}</summary><pre>"
                    + html.escape("\n".join(commands)) + "</pre></details>")
    return "\n".join(body)


def write_report(results, folder):
    """Writes report.html and the figures of the parts that were measured; returns the path of the page."""
    about, parts, summary, contents = results["about"], [], [], []
    for name in (measured.__name__ for measured in SECTIONS if measured.__name__ in results):
        section, number_ = drawn(name, results[name]["results"], about), len(parts) + 1
        summary += [claim._replace(what=f"{claim.what} ({number_})") for claim in section.claims]
        contents.append(f"<li><a href=#s{number_}>{html.escape(section.title)}</a></li>")
        parts.append(part_html(number_, name, section, results[name]["commands"], folder))
    path = folder / "report.html"
    path.write_text(PAGE.format(device=html.escape(about["device"]), style=STYLE, facts=facts(results),
                                playbook=PLAYBOOK, contents="".join(contents), summary=claims_html(summary),
                                parts="\n".join(parts)), encoding="utf-8")
    return path


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     allow_abbrev=False)
    parser.add_argument("--train-gpt", default="./train_gpt", metavar="PROGRAM",
                        help="the trainer (default: %(default)s)")
    for precision in ("bf16", "fp16"):
        parser.add_argument(f"--{precision}", metavar="PROGRAM",
                            help=f"a trainer built with PRECISION={precision}, for the parts that need one")
    parser.add_argument("--out", default="runs/playbook", metavar="FOLDER",
                        help="folder for report.html, a PNG per figure and results.json (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="small runs: about 10 minutes on 2 CPU cores")
    parser.add_argument("--whole-runs", action="store_true", help="measure whole runs in FP8 (needs --bf16): "
                        "about 3 core hours; otherwise the report copies those of data/playbook.json")
    parser.add_argument("--results", metavar="FILE", help="results.json of an earlier run: writes only its page")
    options = parser.parse_args()

    try:
        os.makedirs(options.out, exist_ok=True)
        results = read_json(options.results) if options.results else None
    except OSError as error:
        fail(f"{error.filename}: {error.strerror}; expected a FOLDER for --out, a FILE that exists for --results")
    if not results:
        programs = {name: getattr(options, name) for name in ("bf16", "fp16")}
        if options.whole_runs and not options.bf16:
            fail("--whole-runs: expected also --bf16 PROGRAM")
        results = measure(options.train_gpt, options.quick, programs, options.whole_runs)
        Path(options.out, "results.json").write_text(json.dumps(results))
    print(write_report(results, Path(options.out)))


if __name__ == "__main__":
    try:
        main()
    except Failed as error:
        fail(str(error), 1)
