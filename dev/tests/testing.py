"""For tests in Python: expect() prints whether a fact holds; finish() prints the totals and exits."""
import sys

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
