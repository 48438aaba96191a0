"""Number formats, from their bits.

A number is 2^(e - bias) times 1.mantissa, or where e is 0, 2^(1 - bias) times 0.mantissa (subnormal). The largest e
means infinity and NaN (IEEE 754); E4M3 uses it for numbers, except one code for NaN.
"""
import math


class Format:
    def __init__(self, name, exponent, mantissa, one_nan=False):
        """exponent, mantissa: bits. one_nan: no infinity, and the only NaN has all bits of both set."""
        self.name, self.exponent, self.mantissa = name, exponent, mantissa
        self.bias = 2 ** (exponent - 1) - 1
        self.epsilon = 2.0 ** -mantissa         # between 1 and the next number
        codes = 2 ** exponent - (1 if one_nan else 2)
        self.largest = 2.0 ** (codes - self.bias) * (2 - self.epsilon * (2 if one_nan else 1))
        self.smallest_normal = 2.0 ** (1 - self.bias)
        self.smallest = self.smallest_normal * self.epsilon
        # Powers of two from the smallest normal number to the largest; smaller numbers are less precise.
        self.normal_powers = math.log2(self.largest) - math.log2(self.smallest_normal)


FORMATS = [Format("FP32", 8, 23), Format("BF16", 8, 7), Format("FP16", 5, 10), Format("E4M3", 4, 3, one_nan=True),
           Format("E5M2", 5, 2)]
