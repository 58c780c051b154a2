"""Sizes as Kubernetes writes them: "4Gi", "500M", or a plain number of bytes."""

import re
from decimal import Decimal

PATTERN = r"^[0-9]+(\.[0-9]+)?(Ki|Mi|Gi|Ti|Pi|k|M|G|T|P)?$"
_UNITS = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15}
_UNITS |= {f"{prefix}i": 1024 ** (power + 1) for power, prefix in enumerate("KMGTP")}


def parse_quantity(text: str) -> int:
    """Returns whole bytes, rounded up. Raises ValueError for what is no size."""
    if not re.fullmatch(PATTERN, text):
        raise ValueError(f"{text!r} is not a size; write bytes or a quantity like 4Gi")
    number = text.rstrip("KMGTPik")
    value = Decimal(number) * _UNITS[text[len(number) :]]
    return int(value.to_integral_value(rounding="ROUND_CEILING"))
