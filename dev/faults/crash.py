"""What a power cut may leave of a folder, by the calls that failing.cpp wrote down.

A file's bytes are on disk once fsync() of the file came back, a folder's names once fsync() of the folder did; of what
was not synced, anything may be lost. A file or folder is its content now, the content that is surely on disk, and what
it was in between, of which a disk may hold any.
"""
import os

ZEROS, DROPPED, KEPT = "zeros", "dropped", "kept"


class File:
    def __init__(self, content=b"", durable=b""):
        self.content, self.durable, self.between = bytes(content), durable, []

    def change(self, content):
        self.between.append(self.content)
        self.content = content

    def sync(self):
        self.durable, self.between = self.content, []

    def zeroed(self):
        """Its length arrived on disk, the bytes after what was synced did not."""
        kept = len(os.path.commonprefix([self.content, self.durable]))
        return self.content[:kept] + bytes(len(self.content) - kept)


class Folder(File):
    """Its content: name -> File or Folder."""
    def __init__(self, content=None, durable=None):
        self.content, self.durable, self.between = dict(content or {}), dict(durable or {}), []

    def put(self, name, entry):
        self.change({**self.content, name: entry})


def from_disk(path):
    """What is there now, all of it surely on disk."""
    if os.path.isdir(path):
        entries = {name: from_disk(os.path.join(path, name)) for name in os.listdir(path)}
        return Folder(entries, entries)
    with open(path, "rb") as file: content = file.read()
    return File(content, content)


class Replay:
    """The folder `root` from call to call."""
    def __init__(self, root, tree):
        self.root, self.tree = root, tree

    def find(self, path):
        at = self.tree
        for name in os.path.relpath(path, self.root).split(os.sep):
            at = at if name == "." else at.content[name]
        return at

    def parent(self, path):
        return self.find(os.path.dirname(path)), os.path.basename(path)

    def apply(self, call, path, *more, data=b""):
        folder, name = self.parent(path) if path != self.root else (None, "")
        if call == "mkdir": folder.put(name, Folder())
        elif call == "open" and more[0] == "new": folder.put(name, File())
        elif call == "open" and more[0] == "emptied": self.find(path).change(b"")
        elif call == "write":
            file, offset = self.find(path), int(more[0])
            before = file.content[:offset].ljust(offset, b"\0")
            file.change(before + data + file.content[offset + len(data):])
        elif call == "fsync": self.find(path).sync()
        elif call == "rename":
            to, new_name = self.parent(more[0])
            assert to is folder, "a move to another folder"     # of which a disk may hold either half
            rest = {other: entry for other, entry in folder.content.items() if other != name}
            folder.change({**rest, new_name: folder.content[name]})
        elif call == "unlink":
            folder.change({other: entry for other, entry in folder.content.items() if other != name})


def image(tree, names=KEPT, data=KEPT, draw=None):
    """The tree as bytes and dicts. names, data: what becomes of them where they were not synced; draw(choices) takes
    one of each file's and folder's contents instead."""
    if isinstance(tree, Folder):
        content = tree.content if names == KEPT else tree.durable
        if draw: content = draw([tree.durable, *tree.between, tree.content])
        return {name: image(inner, names, data, draw) for name, inner in sorted(content.items())}
    if draw: return draw([tree.durable, tree.zeroed(), *tree.between, tree.content])
    return {KEPT: tree.content, DROPPED: tree.durable, ZEROS: tree.zeroed()}[data]


def read_trace(path):
    """(call, path, more..., data) of each call."""
    with open(path + ".data", "rb") as file: data = file.read()
    at, calls = 0, []
    with open(path) as file:
        for line in file:
            call, *words = line.rstrip("\n").split("\t")
            length = int(words[2]) if call == "write" else 0
            calls.append((call, words, data[at:at + length]))
            at += length
    return calls


def write_image(path, image):
    if isinstance(image, dict):
        os.makedirs(path, exist_ok=True)
        for name, inner in image.items(): write_image(os.path.join(path, name), inner)
    else:
        with open(path, "wb") as file: file.write(image)
