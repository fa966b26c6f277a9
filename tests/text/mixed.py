"""Texts on which tokenizers differ: code, other scripts, emoji, marks that combine, controls, numbers, long words."""

MIXED = [
    "Hello, world! It's 12345 and 3.14; we'll see, I'M sure.",
    "def f(x):\n    return x ** 2  # squared\n\n\tif x:\r\n        pass",
    "日本語のテキスト、中文字符 와 한국어. Ελληνικά, кириллица, عربى ١٢٣",
    "🙂👩‍👩‍👧‍👦 🇩🇪 ½ Ⅷ ² x²",
    "e\u0301 nai\u0308ve a\u030a\u0323 \u200b\u200d\ufeff",
    "\x01\x07\x1b[0m \t\t \n \n\n   end   ",
    "supercalifragilisticexpialidocious" * 20,
    "<|im_start|>user\nhi<|im_end|><|end|>",
    " leading",
    "a",
]
