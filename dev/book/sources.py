"""The sources as sections of highlighted lines, with their comments as notes and their names linked to definitions."""
import difflib
import functools
import html
import itertools
import re
import textwrap

from pygments.lexers import CudaLexer
from pygments.token import Comment, Keyword, Name, Number, String

BANNER = re.compile(r"// ==== (.+?) =+$")
# Short, because the page has many of them.
TAGS = {Comment.Single: "i", Comment.Multiline: "i", Keyword: "b", String: "u", Number: "s"}
# Definitions begin in the first column; a line with a parenthesis, a semicolon and no "=" is a declaration.
DEFINITION = re.compile(
    r"^(?:(?:template <[^{\n]*> )?(?:struct|class|enum class|enum|union) (?:alignas\(.*\) )?(\w+)"
    r"|(?:static |inline )*constexpr [\w:<>*, ]+? (\w+)(?:\[[^=\n]*\])? ="
    r"|(?:static|extern) [\w:<>*, ]+[ *](\w+)(?: =|;|\[|\{)"
    r"|using (\w+) =|typedef .* (\w+);|#define (\w+)"
    r"|(?![ }/#]|[^=\n]*;$).*?\b(?!__launch_bounds__|decltype|static_assert)(?P<function>\w+)\()", re.M)
TENSORS = re.compile(r"^(?:template <typename Kind> )?struct (?:Parameters|Activations) \{\n.*?^\};", re.M | re.S)
KEYED = re.compile(r"(\w[\w, ]{0,9}?) {2,}(\S.*)")
CODE = re.compile(r"_|\d|[a-z][A-Z]|^[A-Z]{4,}$")
WORD = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]+|[A-Za-z_]\w*\(?")


def escaped(words):
    return html.escape(words, quote=False)


def side_by_side(old, new):
    """Returns two lists of lines as the columns of a table."""
    rows = ""
    for tag, a, b, c, d in difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        for left, right in itertools.zip_longest(old[a:b], new[c:d], fillvalue=""):
            rows += f"<tr class={tag}><td>{escaped(left)}</td><td>{escaped(right)}</td></tr>"
    return f"<table class=pair>{rows}</table>"


class Section:
    """Lines first ... last - 1 of a source, from one banner to the next. Lines are counted from 0."""

    def __init__(self, library, file, title, first, last, id_):
        self.sources, self.file, self.title, self.first, self.last, self.id = library, file, title, first, last, id_
        self.lines = library.lines[file]

    def head_of(self, line):
        """Returns the first line of the function, or other top-level code with its comment, that contains a line."""
        inside = [text[:1] in ("", " ", "}", "#") for text in self.lines]
        return next((i for i in range(line, self.first, -1) if inside[i - 1] and not inside[i]), self.first)

    def html(self, notes, figures):
        """Returns rows of note, code and figures. `notes` ({line from 1: HTML}) stand above the code that they explain,
        those of line 0 at the section's head."""
        above = {}
        for line, note in notes.items():
            if self.first < line <= self.last:
                note = f"<div id=n-{self.sources.id(self.file, line)}>{note}</div>"
                above.setdefault(self.head_of(line - 1), []).append(note)
        comment = [line.lstrip().startswith("//") for line in self.lines]
        starts = [i for i in range(self.first, self.last)
                  if i == self.first or i in above or comment[i] and not comment[i - 1]]
        place = f"<small>{escaped(self.file)}</small>" if self.title != self.file else ""
        rows = [f"<h2 id={self.id}>{escaped(self.title)}{place}</h2>{notes.pop(0, '')}"]
        for start, end in zip(starts, [*starts[1:], self.last]):
            code = next((i for i in range(start, end) if not comment[i]), end)
            note = self.sources.prose(self.lines[start:code])
            rows += above.get(start, [])
            if start == self.first or "<dl>" in note or "<pre>" in note:
                rows.append(f"<div class=banner>{note}</div>")
                note = ""
            columns = self.code(start, code, "k", notes, figures) + self.code(code, end, "", notes, figures)
            rows.append(f"<div class=row><div class=note>{note}</div><div class=code>{columns}</div></div>")
        return f"<section>{''.join(rows)}</section>"

    def code(self, first, last, kind, notes, figures):
        rows = []
        for line in range(first + 1, last + 1):
            id_ = self.sources.id(self.file, line)
            words, colour = figures.get((self.file, line), ("", ""))
            data = f' class="{colour}" data-f="{html.escape(words)}"' if words else ""
            mark = f"<a class=mark href=#n-{id_}></a>" if line in notes else ""
            text = self.lines[line - 1]
            indent = f" style=--i:{len(text) - len(text.lstrip())}" if text.startswith(" ") else ""
            rows.append(f"<p id={id_}{data}{indent}>{mark}{self.sources.highlighted[self.file][line - 1]}</p>")
        return f'<div class="{kind}" style="counter-reset:n {first}">{"".join(rows)}</div>' if rows else ""


class Library:
    def __init__(self, root):
        self.root = root
        paths = [root / "train_gpt.cu", *sorted(root.glob("gpt/*.cuh")), *sorted(root.glob("dev/kernels/*.cu"))]
        self.text = {str(path.relative_to(root)): path.read_text() for path in paths}
        self.lines = {file: text.splitlines() for file, text in self.text.items()}
        self.letters = {file: chr(97 + i // 26) + chr(97 + i % 26) for i, file in enumerate(self.text)}
        self.flags, self.definitions, self.members, self.free = set(), {}, {}, set()
        for file in self.text:
            self.define(file)
        self.highlighted = {file: self.highlight(file) for file in self.text}
        self.parts = {file: self.split(file) for file in self.text}

    def id(self, file, line):
        return f"{self.letters[file]}{line}"

    # ---- sections

    def split(self, file):
        lines = self.lines[file]
        starts = [i for i, line in enumerate(lines) if i == 0 or BANNER.match(line)]
        sections = []
        for i, (first, last) in enumerate(zip(starts, [*starts[1:], len(lines)])):
            banner = BANNER.match(lines[first])
            title = banner[1] if banner else "header" if len(starts) > 1 else file
            sections.append(Section(self, file, title, first, last, f"{self.letters[file]}-{i}"))
        return sections

    # ---- names

    def place(self, file, offset):
        return file, self.text[file].count("\n", 0, offset) + 1

    def define(self, file):
        for match in DEFINITION.finditer(self.text[file]):
            name, place = match[match.lastindex], self.place(file, match.start())
            self.definitions.setdefault(name, place)
            self.definitions.setdefault((file, name), place)    # studies may have kernels of the same name
            if match.lastgroup != "function" or name.endswith("_kernel"):
                self.free.add(name)                             # linked without a following parenthesis, too
        for struct in TENSORS.finditer(self.text[file]):
            for row in re.finditer(r"^ +[\w<> ]+? (\w+(?:, \w+)*);", struct[0], re.M):
                place = self.place(file, struct.start() + row.start())
                self.members.update(dict.fromkeys(row[1].split(", "), place))

    def target_of(self, word, called, member=False, file=None):
        """Returns the id of a name's definition, the one in `file` first, or None."""
        place = self.definitions.get((file, word), self.definitions.get(word)) if called or word in self.free else None
        place = place or (self.members.get(word) if member else None)
        return place and self.id(*place)

    def link(self, words):
        """Returns the id that a name in backticks links to, "" if it exists without a definition here, None if it does
        not exist."""
        if flag := re.match(r"--([a-z][a-z0-9-]*)", words):
            return f"o-{flag[1]}" if flag[1] in self.flags else None
        if words in self.text:
            return self.parts[words][0].id
        if make := re.match(r'make ([\w-]+)(?: P=(\d+)| ONLY="(.*)")?', words):
            return "" if self.can_make(*make.groups()) else None
        name = re.split(r"\.|->|::", re.sub(r"[(<\[].*", "", words))[-1]
        exists = (self.root / words.split()[0]).exists() or words in self.everything
        return self.target_of(name, True, True) or ("" if exists else None)

    def can_make(self, target, puzzle, test):
        return (re.search(rf"^[\w\- ]*\b{target}\b[\w\- ]*:", self.everything, re.M)
                and (not puzzle or any(self.root.glob(f"dev/puzzles/{int(puzzle):02}_*.cu")))
                and (not test or f'TEST("{test}' in self.everything))

    @functools.cached_property
    def everything(self):
        patterns = ("Makefile", "dev/**/Makefile", "*.cu", "gpt/*.[hc]*", "dev/kernels/*.cu", "dev/tests/*.cuh")
        return "".join(path.read_text() for pattern in patterns for path in self.root.glob(pattern))

    def options(self, text, markdown):
        """Returns the tables of `--help markdown` as HTML, and keeps the names of the flags."""
        self.flags = set(re.findall(r"^\| `--([a-z0-9-]+)", text, re.M))
        page = markdown(re.sub(r"\[(.*?)\]\(.*?\)", r"\1", text[text.index("## "):]))
        return re.sub(r"<td><a href=#(o-[\w-]+)>", r"<td><a id=\1 href=#\1>", page)

    # ---- text

    def linked(self, words):
        """Returns a comment's words as HTML with links."""
        def word(match):
            name, called = match[0].rstrip("("), match[0].endswith("(")
            if name.startswith("--"):
                return f"<a href=#o-{name[2:]}>{name}</a>" if name[2:] in self.flags else name
            code = called or CODE.search(name) or match.string.startswith("::", match.end())    # "device" is a word
            at = self.target_of(name, True) if code else None
            return f"<a href=#{at}>{name}</a>{'(' * called}" if at else match[0]
        return "".join(f"<code>{escaped(part)}</code>" if i % 2 else WORD.sub(word, escaped(part))
                       for i, part in enumerate(words.split("`")))

    def prose(self, comment):
        """Returns comment lines as HTML: `---- title`, rows `word  text`, items, indented lines as they are, and
        paragraphs. An empty line, or another kind of line, ends each of them."""
        blocks, kind, indent, before = [], "", 0, ""       # blocks: [kind, key, text]
        for line in comment:
            row = re.sub(r"^\s*// ?", "", line)
            keyed, item = KEYED.match(row), re.match(r" *- (.*)", row)
            if not row.strip() or BANNER.match(line):
                kind = ""
            elif row.startswith("---- "):
                kind = ""
                blocks.append(["h4", "", row.strip("- ")])
            elif keyed:
                kind, indent = "dl", keyed.start(2)
                blocks.append([kind, keyed[1], keyed[2]])
            elif kind == "dl" and row.startswith(" " * indent):
                full = len(before) + 1 + len(row.split()[0]) >= 120        # the line before ended for lack of room
                blocks[-1][2] += f" {row.strip()}" if full else f"\n{row[indent:]}"
            elif kind == "pre" and row.startswith(" "):
                blocks[-1][2] += f"\n{row}"
            elif item:
                kind = "item"
                blocks.append(["p", "", f"• {item[1]}"])
            elif kind == "item" and row.startswith("  ") or kind == "p" and not row.startswith(" "):
                blocks[-1][2] += f" {row.strip()}"
            elif indent and re.match(rf" {{{indent}}}\S", row):                   # a row goes on below a diagram
                kind = "dl"
                blocks.append([kind, "", row.strip()])
            else:
                kind = "pre" if row.startswith(" ") else "p"
                blocks.append([kind, "", row])
            before = line
        page = "".join(f"<dt>{escaped(key)}</dt><dd>{self.linked(text)}</dd>" if kind == "dl" else
                       f"<{kind}>{self.linked(text)}</{kind}>" for kind, key, text in blocks)
        return re.sub(r"((?:<dt>.*?</dd>)+)", r"<dl>\1</dl>", page, flags=re.S)

    def highlight(self, file):
        """Returns a source's lines as HTML."""
        tokens = [*CudaLexer(ensurenl=False, stripnl=False).get_tokens(self.text[file])]
        page, line, before = "", 1, ""
        for (kind, value), (_, after) in zip(tokens, [*tokens[1:], (None, "")]):
            shown = escaped(value)
            tag = next((tag for token, tag in TAGS.items() if kind in token), None)
            if kind in Name:
                at = self.target_of(value, after[:1] in ("(", "<"), before == ".", file)
                shown = f"<a href=#{at}>{shown}</a>" if at and at != self.id(file, line) else shown
            elif tag:
                shown = re.sub("(.+)", rf"<{tag}>\1</{tag}>", shown)        # a tag for each line
            page += shown
            line += value.count("\n")
            before = value.strip() or before
        return page.splitlines()

    # ---- steps of a study, side by side

    def body(self, file, name):
        """Returns a definition's lines, up to the closing brace in the first column."""
        file, line = self.definitions.get((file, name), self.definitions.get(name))
        lines, first, end = self.lines[file], line - 1, line
        if not lines[first].endswith(("}", ";")):
            end = next(i for i in range(line, len(lines)) if lines[i].startswith("}")) + 1
        while lines[first - 1].startswith(("template", "__global__")):
            first -= 1
        return lines[first:end]

    def kernels(self, file, code):
        """Returns the lines of the kernels that a step's code launches, directly or through a launcher."""
        found = []
        for word in re.findall(r"\w+", code):
            if word in self.definitions:
                inside = word if word.endswith("_kernel") else "\n".join(self.body(file, word))
                found += [name for name in re.findall(r"\w+_kernel\b", inside) if name in self.definitions]
        return [line for name in dict.fromkeys(found) for line in ["", *self.body(file, name)]]

    def comparisons(self, file):
        """Returns each step of a study next to the step before it: its call and, if they differ, its kernels."""
        parts, before, text = [], None, self.text[file]
        for match in re.finditer(r"( *)\b(?:Case c\(|c\.step\(([^\n]*\);|.*?\n\1\}\);)\n)", text, re.S):
            if not match[2]:
                before = None
                continue
            title, index = re.match(r'(?:format\()?(?:"(.*?)"|STEPS\[(\d)\])', match[2]).groups()
            if index:
                title = re.findall(r'"(.*?)"', text[text.index("STEPS[]"):])[int(index)]
            now = title, textwrap.dedent(match[0]).splitlines(), self.kernels(file, match[0])
            if before:
                columns = [call if before[2] == now[2] else call + kernels for _, call, kernels in (before, now)]
                parts.append(f"<details class=steps><summary>{escaped(before[0])} → {escaped(title)}</summary>"
                             f"{side_by_side(*columns)}</details>")
            before = now
        return f"<h3>Steps side by side</h3>{''.join(parts)}" if parts else ""
