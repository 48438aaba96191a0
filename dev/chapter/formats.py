"""Number formats, from their bits: how many are exponent and mantissa, and what the largest exponent means.

A number is 2^(e - bias) times 1.mantissa, or where e is 0, 2^(1 - bias) times 0.mantissa (subnormal).
"""
import math
from dataclasses import dataclass

# What the largest exponent is kept for.
INFINITY_AND_NANS = "infinity and NaNs"     # IEEE 754
ONE_NAN = "numbers, but for one NaN"        # E4M3: with all bits of the mantissa set; there is no infinity


@dataclass(frozen=True)
class Format:
    name: str
    exponent: int           # bits
    mantissa: int
    largest_exponent: str = INFINITY_AND_NANS

    @property
    def bits(self):
        return 1 + self.exponent + self.mantissa

    @property
    def bias(self):
        return 2 ** (self.exponent - 1) - 1

    @property
    def largest(self):
        most = 2 ** self.exponent - 1
        if self.largest_exponent == ONE_NAN:
            return 2.0 ** (most - self.bias) * (2 - 2 * self.epsilon)
        return 2.0 ** (most - 1 - self.bias) * (2 - self.epsilon)

    @property
    def smallest_normal(self):
        return 2.0 ** (1 - self.bias)

    @property
    def smallest(self):
        return self.smallest_normal * self.epsilon

    @property
    def epsilon(self):
        """Between 1 and the next number."""
        return 2.0 ** -self.mantissa

    @property
    def digits(self):
        """Decimal, of a normal number."""
        return (self.mantissa + 1) * math.log10(2)

    @property
    def powers(self):
        """Of two, from the smallest number to the largest."""
        return math.log2(self.largest) - math.log2(self.smallest)

    @property
    def normal_powers(self):
        """The same of normal numbers, which are of full precision."""
        return math.log2(self.largest) - math.log2(self.smallest_normal)

    def worst_error(self, power):
        """The largest relative error of rounding a number from 2^power up to twice that, power being whole; 1 where
        some become 0, None beyond the largest."""
        magnitude = 2.0 ** power
        if magnitude > self.largest:
            return None
        return min(1.0, max(magnitude, self.smallest_normal) * self.epsilon / 2 / magnitude)


FORMATS = [Format("FP32", 8, 23), Format("BF16", 8, 7), Format("FP16", 5, 10), Format("E4M3", 4, 3, ONE_NAN),
           Format("E5M2", 5, 2)]
