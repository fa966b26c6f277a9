"""Numbers for people. Sizes carry both units, because papers and vendors mix them: 1.34 GB is 1.25 GiB.

GB = 10⁹ bytes          GiB = 2³⁰ bytes
"""

PREFIXES = {1000: ["", *"kMGTPEZY"], 1024: ["", *(f"{prefix}i" for prefix in "KMGTPEZY")]}


def amount(number: float, unit: str = "", step: int = 1000) -> str:
    """12_345_678, "B", 1024 -> '11.8 MiB'"""
    scaled, prefixes = float(number), PREFIXES[step]
    while scaled >= step and len(prefixes) > 1:
        scaled, prefixes = scaled / step, prefixes[1:]
    digits = f"{scaled:.3g}" if scaled < 999.5 else f"{scaled:.0f}"
    return f"{digits} {prefixes[0]}{unit}".rstrip()


def size(number: float) -> str:
    """1_342_177_280 -> '1.34 GB (1.25 GiB)'"""
    return amount(number, "B") if number < 1000 else f"{amount(number, 'B')} ({amount(number, 'B', 1024)})"
