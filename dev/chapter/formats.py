"""Number formats, from their bits.

A number is 2^(e - bias) times 1.mantissa, or where e is 0, 2^(1 - bias) times 0.mantissa (subnormal). The largest e
means infinity and NaN (IEEE 754); E4M3 uses it for numbers, except one code for NaN.
"""
import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Format:
    name: str
    exponent: int           # bits
    mantissa: int
    one_nan: bool = False   # no infinity, and the only NaN has all bits of the exponent and the mantissa set

    @property
    def bias(self):
        return 2 ** (self.exponent - 1) - 1

    @property
    def largest(self):
        codes = 2 ** self.exponent - (1 if self.one_nan else 2)
        return 2.0 ** (codes - self.bias) * (2 - self.epsilon * (2 if self.one_nan else 1))

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
    def normal_powers(self):
        """Powers of two from the smallest normal number to the largest; smaller numbers are less precise."""
        return math.log2(self.largest) - math.log2(self.smallest_normal)


FORMATS = [Format("FP32", 8, 23), Format("BF16", 8, 7), Format("FP16", 5, 10), Format("E4M3", 4, 3, one_nan=True),
           Format("E5M2", 5, 2)]
