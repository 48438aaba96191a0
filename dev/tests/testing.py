"""For tests in Python: expect() prints whether a fact holds; finish() prints the totals and exits."""
import contextlib
import os
import sys
import tempfile
import time
from pathlib import Path

passed = failed = 0


def expect(holds, text, detail=""):
    """Counts and prints a result: one line with "ok" or "FAILED" and `text`; a failed one also has `detail`."""
    global passed, failed
    passed, failed = passed + bool(holds), failed + (not holds)
    print(f"{'ok    ' if holds else 'FAILED'}  {text}" + (f" ({detail})" if detail and not holds else ""), flush=True)


def expect_equal(found, expected, text):
    """Expects two equal values; prints both if they differ."""
    expect(found == expected, text, f"found {found}, expected {expected}")


def finish():
    """Prints the totals and exits: with 1 if a result failed or no test ran, otherwise with 0."""
    print(f"{passed} passed, {failed} failed")
    sys.exit(failed > 0 or passed == 0)


def run_tests(names):
    """Calls each function in globals() `names` whose name begins with test_, in the order of their definitions, in a
    temporary current folder; then finishes."""
    with scratch_folder():
        for test in [value for name, value in names.items() if name.startswith("test_")]:
            test()
    finish()


@contextlib.contextmanager
def scratch_folder():
    """Creates a temporary folder, which is the current one inside the `with` statement."""
    before = os.getcwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            yield folder
        finally:
            os.chdir(before)


def wait_for(holds, seconds=120):
    """Waits until holds() is true, for at most this many seconds; returns its last value."""
    deadline = time.monotonic() + seconds
    while not (result := holds()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return result


def write(path, content, mode=0o644):
    """Writes text or bytes to a file; creates its folder."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    path.chmod(mode)
