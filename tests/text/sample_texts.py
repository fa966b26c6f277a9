"""Strings on which tokenizers differ: code, scripts, emoji, combining marks, controls, numbers, long words."""

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

EDGE_CASES = [
    "",
    " ",
    "\n",
    "\x00",
    "a\x00b\x7f\x85c",
    "שלום, עולם! \u202eמימין לשמאל\u202c \u0627\u0644\u0633\u0644\u0627\u0645",
    "👨🏽‍🚒❤️‍🔥🏳️‍🌈 1️⃣ ☝🏿",
    "Z̷a̶l̵g̴o̸ क्षत्रिय ﬁne ＦＵＬＬ　ｗｉｄｔｈ Å ẛ̣",
    "  two  three   \t\ttabs \u00a0\u2003wide\u3000  \r\n\r\n\n end \n ",
    "It 's n't so , we 've been ; they 're ' here ' . Why ?  ! I 'm .",
    "<s>hi</s> <pad>[MASK] [CLS][SEP] <mask> <unk> </s",
    "x = {'k': [1, 2.5e-3], \"s\": r'\\d+'}  # ünïcode → λ",
    "\u0301\u200d\ufe0f\U000e0001\uffff\ufffd\U0010ffff",
    "ABC abc İstanbul ǅ ß ŉ Straße ΑΣ",
    "3,000,000 1_000 0xFF ١٢٣٤ ⅫⅣ 12345678901234567890",
]

LONG = ["a" * 100_000, "ab" * 50_000, "日本" * 50_000, " " * 100_000, "supercalifragilistic" * 5_000]
