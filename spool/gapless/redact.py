"""No secret enters the spool: what is taken out of configs, command lines and other captured text.

Two rules. A text under a credential's name is replaced whole. A text that looks like a known key, or holds a user and
password in a URL, loses that part wherever it stands. Numbers and metrics are never touched.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

REDACTED = "<redacted>"

_NAME = (
    r"(?:[a-z0-9_]*_)?"
    r"(?:api_?key|secret(?:_key)?|access_key|private_key|passwd|password|passphrase|credentials?|authorization"
    r"|(?:wandb|swanlab|hf|openai|anthropic|ngc|ssh|signing|encryption|master|account|subscription|storage)_key"
    r"|(?:hf|hub|auth|access|refresh|bearer|session|api|client|personal|deploy|csrf|jwt|github|gitlab|git|pypi|slack|wandb"
    r"|swanlab|openai|anthropic)_?token)"
)
_SECRET_NAME = re.compile(rf"{_NAME}|token", re.IGNORECASE)
_HOLDER_NAME = re.compile(_NAME, re.IGNORECASE)
_LAST_PART = re.compile(r"[^./:\s\[\]]+(?=[./:\s\[\]]*$)")

# Each shape is a vendor's own, long enough that no word of a config has it.
_KEY_SHAPES = re.compile(
    r"(?<![A-Za-z0-9])(?:"
    r"wandb_v1_[A-Za-z0-9_-]{20,}"
    r"|local-[0-9a-f]{40}"
    r"|sk-[A-Za-z0-9_-]{20,}"
    r"|hf_[A-Za-z0-9]{20,}"
    r"|gh[pousr]_[A-Za-z0-9]{20,}"
    r"|github_pat_[A-Za-z0-9_]{20,}"
    r"|glpat-[A-Za-z0-9_-]{20,}"
    r"|(?:AKIA|ASIA)[0-9A-Z]{16}"
    r"|AIza[0-9A-Za-z_-]{35}"
    r"|xox[abeprs]-[A-Za-z0-9-]{10,}"
    r"|eyJ[A-Za-z0-9_-]{8,}\.eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]+"
    r")(?![A-Za-z0-9])"
)
_PEM = re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL)
# W&B's older keys are 40 hex digits, as git commits are: a word before them, or the key's name, tells them apart.
_HEX40 = re.compile(r"(?<![0-9A-Za-z])[0-9a-f]{40}(?![0-9A-Za-z])")
_COMMIT = re.compile(r"commit|sha|rev|git|hash|digest|checksum|version|tree|parent|branch|ref|\bat\b|@", re.IGNORECASE)
# SwanLab's keys are 21 letters and digits.
_NANO21 = re.compile(
    r"(?<![0-9A-Za-z_.-])(?=[A-Za-z]*[0-9])(?=[0-9a-z]*[A-Z])(?=[0-9A-Z]*[a-z])[0-9A-Za-z]{21}(?![0-9A-Za-z_.-])"
)
_USER_INFO = re.compile(r"\b([a-z][a-z0-9+.-]*://)[^\s/@:'\"]*:[^\s/@'\"]+@", re.IGNORECASE)
_ASSIGNED = re.compile(
    rf"(?<![A-Za-z0-9])(?P<name>(?:[A-Za-z0-9.-]*[.-])?(?:{_NAME.replace('_?', '[_-]?')}|token))"
    r"(?P<quote>['\"]?\s*[=:]\s*(?:Bearer\s+)?)"
    r"(?:'[^']*'|\"[^\"]*\"|[^\s,;&'\"\]})]+)",
    re.IGNORECASE,
)
_QUERY = re.compile(rf"([?&;](?:{_NAME.replace('_?', '[_-]?')}|token|key)=)[^&;#\s'\"]+", re.IGNORECASE)
_BEARER = re.compile(r"\b(Bearer\s+)[A-Za-z0-9._~+/=-]{8,}", re.IGNORECASE)


def is_secret_name(key: str) -> bool:
    """Whether the last part of `key` is a credential's name: `a/b.wandb_api_key` is, `n_tokens` is not."""
    found = _LAST_PART.search(key)
    return found is not None and _SECRET_NAME.fullmatch(found[0].lstrip("-").replace("-", "_")) is not None


def holds_secrets(key: str) -> bool:
    """Whether all texts under `key`, however deep, are a credential's: `password: {value: ...}`."""
    return _HOLDER_NAME.fullmatch(key.lstrip("-").replace("-", "_")) is not None


def scrub_value(text: str, key: str = "") -> str:
    """`text` without what looks like a key or a URL's password; `key` is the name it stands under."""
    if len(text) < 8:
        return text
    if "://" in text:
        text = _USER_INFO.sub(rf"\1{REDACTED}@", text)
        text = _QUERY.sub(rf"\1{REDACTED}", text)
    if text.startswith("--"):
        text = _ASSIGNED.sub(lambda m: f"{m['name']}{m['quote']}{REDACTED}", text)
    if "PRIVATE KEY" in text:
        text = _PEM.sub(REDACTED, text)
    text = _KEY_SHAPES.sub(REDACTED, text)
    if len(text) >= 40:
        whole = text
        text = _HEX40.sub(lambda m: m[0] if _COMMIT.search(f"{key} {whole[: m.start()][-24:]}") else REDACTED, text)
    if len(text) >= 21:
        text = _NANO21.sub(REDACTED, text)
    return text


def scrub_text(text: str, key: str = "") -> str:
    """Free text (a repr, notes, a console line): as `scrub_value`, and `name=value` under a credential's name."""
    text = _ASSIGNED.sub(lambda m: f"{m['name']}{m['quote']}{REDACTED}", text)
    return _BEARER.sub(rf"\1{REDACTED}", scrub_value(text, key))


def scrub_flags(items: Sequence[Any]) -> list[Any]:
    """A list with flags in it: a text that follows a flag with a credential's name is redacted."""
    return [
        REDACTED
        if type(item) is str and not item.startswith("--") and is_secret_name(_flag_before(items, at))
        else item
        for at, item in enumerate(items)
    ]


def scrub_command(args: Sequence[str]) -> list[str]:
    """A command line: as `scrub_flags`, and each argument as free text."""
    clean = scrub_flags(args)
    for at, arg in enumerate(clean):
        name, equals, value = arg.partition("=")
        if equals and is_secret_name(name):
            clean[at] = f"{name}={REDACTED}" if value else arg
        else:
            clean[at] = scrub_text(arg, _flag_before(args, at))
    return clean


def _flag_before(items: Sequence[Any], at: int) -> str:
    """The flag whose value the item at `at` may be; empty where there is none."""
    before = items[at - 1] if at else ""
    return before if type(before) is str and before.startswith("-") and "=" not in before else ""
