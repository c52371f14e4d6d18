"""How the operands of the experts' GEMMs are multiplied; shared by the front ends."""

from typing import Any

from anabranch.checks import choice

HIGHEST = 0
TF32 = 1
FP8 = 2
#: ab_precision by name, the default first.
NUMBERS = {"highest": HIGHEST, "tf32": TF32, "fp8": FP8}
#: Precisions of GEMMs without experts' weights, which are never quantised.
DENSE_PRECISIONS = ("highest", "tf32")
#: ab_fp8_scales by name, the default first.
FP8_SCALES = {"float32": 0, "power_of_two": 1}
#: Side length of a block of elements that shares a scale.
BLOCK = 128


def precision_number(value: Any) -> int:
    """Converts the argument `precision` of a GEMM with the experts' weights, one of `NUMBERS`."""
    if isinstance(value, str) and value == "auto":
        raise ValueError(
            "precision: got 'auto', which is no longer an option; expected 'highest', 'tf32' or 'fp8', for example "
            "anabranch.choose_precision(size, dtype=..., capability=...).precision"
        )
    return NUMBERS[choice("precision", value, tuple(NUMBERS))]


def dense_precision_number(value: Any) -> int:
    """Converts the argument `precision` of a GEMM without experts' weights, one of `DENSE_PRECISIONS`."""
    return NUMBERS[choice("precision", value, DENSE_PRECISIONS)]


def dense_precision(value: str) -> str:
    """The precision of GEMMs without experts' weights in a layer whose experts have this precision.

    >>> dense_precision("fp8"), dense_precision("tf32")
    ('highest', 'tf32')
    """
    return value if value in DENSE_PRECISIONS else "highest"


def fp8_scales_number(value: Any) -> int:
    """Converts the argument `fp8_scales`, one of `FP8_SCALES`."""
    return FP8_SCALES[choice("fp8_scales", value, tuple(FP8_SCALES))]


def check_fp8(precision: int, fp8_scales: Any, quantized: Any = None) -> int:
    """Converts the argument `fp8_scales`. A value other than the default, and quantised experts, require FP8."""
    number = fp8_scales_number(fp8_scales)
    if precision != FP8 and number:
        raise ValueError(f'fp8_scales: got {fp8_scales!r} without precision="fp8", expected "float32"')
    if precision != FP8 and quantized is not None:
        raise ValueError(f'quantized: got {type(quantized).__name__} without precision="fp8", expected None')
    return number


def check_fp8_exchange(precision: int, fp8_exchange: bool) -> None:
    """Refuses the exchange of quantised tokens unless the precision is FP8."""
    if fp8_exchange and precision != FP8:
        raise ValueError('fp8_exchange: got True without precision="fp8", expected False')


def check_fp8_widths(name: str, described: str, **sizes: int) -> None:
    """Refuses widths that are not multiples of a block. described: the argument's description, for the error."""
    for width, size in sizes.items():
        if size % BLOCK:
            raise ValueError(
                f'{name}: got {described}, expected {width} a multiple of {BLOCK}, since precision="fp8" has a scale '
                f"for every block of {BLOCK}"
            )
