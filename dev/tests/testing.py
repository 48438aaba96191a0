"""expect() prints whether a check holds; finish() prints the totals and ends the program."""
import sys

passed = failed = 0


def expect(holds, text, detail=""):
    """Counts and prints whether `text` holds; `detail` is printed where it does not."""
    global passed, failed
    passed, failed = passed + bool(holds), failed + (not holds)
    print(f"{'ok    ' if holds else 'FAILED'}  {text}" + (f" ({detail})" if detail and not holds else ""), flush=True)


def expect_equal(found, expected, text):
    """The same for a comparison, which prints both values where they differ."""
    expect(found == expected, text, f"found {found}, expected {expected}")


def finish():
    """Prints the totals; exits with 1 if a check failed or none ran."""
    print(f"{passed} passed, {failed} failed")
    sys.exit(failed > 0 or passed == 0)
