"""Range and precision of number formats, computed from their numbers of bits.

A number with exponent code e is 2^(e - bias) times 1.mantissa; if e is 0 it is 2^(1 - bias) times 0.mantissa
(subnormal). The largest e encodes infinity and NaN (IEEE 754). E4M3 uses it for numbers, except one code for NaN.
"""
import math


class Format:
    def __init__(self, name, exponent, mantissa, one_nan=False):
        """exponent, mantissa: numbers of bits. one_nan: no infinity, and only the code with all bits set is NaN."""
        self.name, self.exponent, self.mantissa = name, exponent, mantissa
        self.bias = 2 ** (exponent - 1) - 1
        self.epsilon = 2.0 ** -mantissa         # distance from 1 to the next number
        codes = 2 ** exponent - (1 if one_nan else 2)
        self.largest = 2.0 ** (codes - self.bias) * (2 - self.epsilon * (2 if one_nan else 1))
        self.smallest_normal = 2.0 ** (1 - self.bias)
        self.smallest = self.smallest_normal * self.epsilon
        # Powers of two from the smallest normal number to the largest. Subnormal numbers are less precise.
        self.normal_powers = math.log2(self.largest) - math.log2(self.smallest_normal)


FORMATS = [Format("FP32", 8, 23), Format("BF16", 8, 7), Format("FP16", 5, 10), Format("E4M3", 4, 3, one_nan=True),
           Format("E5M2", 5, 2)]
