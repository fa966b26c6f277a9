"""The special tokens of Whisper (Radford et al. 2022), from `generation_config.json` or else from the vocabulary.

    <|startofprev|> prompt … <|startoftranscript|> <|en|> <|transcribe|> <|0.00|> text … <|2.40|> <|endoftext|>

The start, the language and the task are given to the model, or detected. <|notimestamps|> follows them if the text has
no timestamps. Timestamps count steps of 0.02 seconds from the start of the window; their ids follow <|notimestamps|>.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from regard.spec import suggest_name
from regard.text.tokenizer import Tokenizer

TASKS = ("transcribe", "translate")
LANGUAGE_TOKEN = re.compile(r"<\|([a-z]{2,3})\|>")
TABLE = """
en:english zh:chinese de:german es:spanish ru:russian ko:korean fr:french ja:japanese pt:portuguese tr:turkish
pl:polish ca:catalan nl:dutch ar:arabic sv:swedish it:italian id:indonesian hi:hindi fi:finnish vi:vietnamese
he:hebrew uk:ukrainian el:greek ms:malay cs:czech ro:romanian da:danish hu:hungarian ta:tamil no:norwegian
th:thai ur:urdu hr:croatian bg:bulgarian lt:lithuanian la:latin mi:maori ml:malayalam cy:welsh sk:slovak
te:telugu fa:persian lv:latvian bn:bengali sr:serbian az:azerbaijani sl:slovenian kn:kannada et:estonian
mk:macedonian br:breton eu:basque is:icelandic hy:armenian ne:nepali mn:mongolian bs:bosnian kk:kazakh
sq:albanian sw:swahili gl:galician mr:marathi pa:punjabi si:sinhala km:khmer sn:shona yo:yoruba so:somali
af:afrikaans oc:occitan ka:georgian be:belarusian tg:tajik sd:sindhi gu:gujarati am:amharic yi:yiddish lo:lao
uz:uzbek fo:faroese ht:haitian_creole ps:pashto tk:turkmen nn:nynorsk mt:maltese sa:sanskrit lb:luxembourgish
my:myanmar bo:tibetan tl:tagalog mg:malagasy as:assamese tt:tatar haw:hawaiian ln:lingala ha:hausa ba:bashkir
jw:javanese su:sundanese yue:cantonese
"""
LANGUAGES: dict[str, str] = {
    code: name.replace("_", " ") for code, _, name in (pair.partition(":") for pair in TABLE.split())
}
OTHER_NAMES = {
    "burmese": "my", "valencian": "ca", "flemish": "nl", "haitian": "ht", "letzeburgesch": "lb", "pushto": "ps",
    "panjabi": "pa", "moldavian": "ro", "moldovan": "ro", "sinhalese": "si", "castilian": "es", "mandarin": "zh",
}  # fmt: skip
CODES = {name: code for code, name in LANGUAGES.items()} | OTHER_NAMES


@dataclass(frozen=True)
class WhisperTokens:
    start: int  # <|startoftranscript|>
    end: int  # <|endoftext|>
    no_timestamps: int
    previous: int | None  # <|startofprev|>, before a prompt
    languages: Mapping[str, int]  # by code; empty: the model is English-only, and has no tasks
    tasks: Mapping[str, int]
    suppress: tuple[int, ...] = ()  # never generated
    begin_suppress: tuple[int, ...] = ()  # never generated first
    max_initial_timestamp: int | None = None  # steps of 0.02 seconds

    @property
    def timestamp_begin(self) -> int:
        return self.no_timestamps + 1

    @property
    def no_speech(self) -> int:
        return self.no_timestamps - 1

    def language_ids(self, language: str | None) -> tuple[int, ...]:
        """The id of a language, all ids if it is to be detected, none for an English-only model."""
        if language is None:
            return tuple(self.languages.values())
        if not self.languages:
            language_code(language, ["en"])
            return ()
        return (self.languages[language_code(language, self.languages)],)

    def language_of(self, id: int) -> str:
        return next(code for code, known in self.languages.items() if known == id)

    def task_ids(self, task: str) -> tuple[int, ...]:
        if task not in TASKS:
            raise ValueError(f"task={task!r} must be one of {', '.join(TASKS)}")
        if task not in self.tasks:
            if task == "translate":
                raise ValueError("this model is English-only and cannot translate; use a multilingual one")
            return ()
        return (self.tasks[task],)


def read_whisper_tokens(tokenizer: Tokenizer, vocab: int) -> WhisperTokens:
    """ValueError if the model has no such tokens, so that it is no Whisper. vocab: of the model."""
    settings, ids = tokenizer.generation, tokenizer.core.get_vocab(with_added_tokens=True)

    def find(key: str, token: str) -> int | None:
        value = settings.get(key)
        return ids.get(token) if value is None else value

    start, no_timestamps = tokenizer.decoder_start, find("no_timestamps_token_id", "<|notimestamps|>")
    start = ids.get("<|startoftranscript|>") if start is None else start
    if start is None or no_timestamps is None or tokenizer.eos is None:
        raise ValueError(
            "this model has no tokens for the start of a transcript, its end and <|notimestamps|>; "
            "use a Whisper model, with its generation_config.json and tokenizer.json"
        )
    languages = read_languages(settings, ids) if settings.get("is_multilingual", True) else {}
    tasks = settings.get("task_to_id")
    if not isinstance(tasks, dict):
        tasks = {task: ids[f"<|{task}|>"] for task in TASKS if f"<|{task}|>" in ids}
    tokens = WhisperTokens(
        start, tokenizer.eos, no_timestamps, find("prev_sot_token_id", "<|startofprev|>"), languages,
        tasks if languages else {}, as_tuple(settings.get("suppress_tokens")),
        as_tuple(settings.get("begin_suppress_tokens")), settings.get("max_initial_timestamp_index"),
    )  # fmt: skip
    check_ids(tokens, vocab)
    return tokens


def read_languages(settings: Mapping[str, Any], ids: Mapping[str, int]) -> dict[str, int]:
    listed = settings.get("lang_to_id")
    if not isinstance(listed, dict):  # in older folders
        listed = {token: id for token, id in ids.items() if token[2:-2] in LANGUAGES}
    return {match[1]: id for token, id in listed.items() if (match := LANGUAGE_TOKEN.fullmatch(token))}


def as_tuple(value: Any) -> tuple[Any, ...]:
    """The ids of a list; any other value is an id, which `check_ids` refuses if it is none."""
    return tuple(value) if isinstance(value, list) else () if value is None else (value,)


def check_ids(tokens: WhisperTokens, vocab: int) -> None:
    named: list[Any] = [tokens.start, tokens.end, tokens.no_timestamps, *tokens.suppress, *tokens.begin_suppress]
    named += [
        *tokens.languages.values(),
        *tokens.tasks.values(),
        *(() if tokens.previous is None else [tokens.previous]),
    ]
    for id in named:
        if type(id) is not int or not 0 <= id < vocab:
            raise ValueError(f"generation_config.json names the token {id!r:.40}; the model's ids are 0 to {vocab - 1}")
    if tokens.timestamp_begin >= vocab:
        raise ValueError(f"the model's ids are 0 to {vocab - 1}, and none of them is a timestamp")
    steps = tokens.max_initial_timestamp
    if steps is not None and (type(steps) is not int or steps < 0):
        raise ValueError(f"generation_config.json: max_initial_timestamp_index={steps!r:.40} must be at least 0")


def language_code(language: str, known: Iterable[str]) -> str:
    """The code of a language, given as its code or its English name. ValueError unless the code is in `known`."""
    known, name = list(known), language.lower()
    code = name if name in known else CODES.get(name, name)
    if code not in known:
        near = suggest_name(name[:40], [*known, *(LANGUAGES[code] for code in known if code in LANGUAGES)])
        raise ValueError(f"language={language[:40]!r} is not a language of this model; {near}")
    return code


def language_name(code: str) -> str:
    return LANGUAGES.get(code, code)
