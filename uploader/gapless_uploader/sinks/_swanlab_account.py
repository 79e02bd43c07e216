"""Whose SwanLab account, at which host: from the uploader's own environment or `swanlab login`, never from a run.

`SWANLAB_API_KEY` with `SWANLAB_API_HOST`, else the file that `swanlab login` wrote (`$SWANLAB_ROOT/.netrc`, else
`$SWANLAB_SAVE_DIR/.netrc`, else `~/.swanlab/.netrc`). The file's key belongs to the file's host and is used for no
other. A `.swanlab`, `.env` or `swanlab.yaml` in the working folder is not looked at: the folder may be a spool's.
"""

from __future__ import annotations

import netrc
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from gapless_uploader.sink import Misconfigured

API_HOST = "https://api.swanlab.cn"
WEB_HOST = "https://swanlab.cn"


@dataclass(frozen=True, slots=True)
class Account:
    """A key and the hosts it belongs to. The key is in no repr."""

    api_host: str
    web_host: str
    key: str = field(repr=False)


def find_account(environ: Mapping[str, str]) -> Account:
    """The account that `environ` or its login file names. Raises Misconfigured with the way out."""
    key = _value(environ, "SWANLAB_API_KEY")
    api_host = host_of(_value(environ, "SWANLAB_API_HOST"))
    web_host = host_of(_value(environ, "SWANLAB_WEB_HOST"))
    if not key:
        path = login_file(environ)
        saved = _read(path)
        if saved is None:
            raise Misconfigured(f"no SwanLab API key ({path} holds none): swanlab login, or set SWANLAB_API_KEY")
        key, saved_api, saved_web = saved
        if api_host and api_host != saved_api:
            raise Misconfigured(
                f"SWANLAB_API_HOST is {api_host}, but {path} holds a key for {saved_api}:"
                f" swanlab login -h {api_host}, or set SWANLAB_API_KEY"
            )
        api_host, web_host = saved_api, web_host or saved_web
    api_host = api_host or API_HOST
    return Account(api_host, web_host or (WEB_HOST if api_host == API_HOST else api_host), key)


def login_file(environ: Mapping[str, str]) -> Path:
    """Where `swanlab login` keeps the key."""
    root = _value(environ, "SWANLAB_ROOT") or _value(environ, "SWANLAB_SAVE_DIR")
    return (Path(root) if root else Path.home() / ".swanlab") / ".netrc"


def host_of(text: str) -> str:
    """Scheme and host of `text`, https where it names none; empty for empty. Raises Misconfigured."""
    if not text:
        return ""
    parts = urlsplit(text if "//" in text else f"https://{text}")
    if parts.scheme not in ("http", "https") or not parts.netloc or "@" in parts.netloc:
        raise Misconfigured("a SwanLab host must be like https://swanlab.example.org, without user and password")
    return f"{parts.scheme}://{parts.netloc}"


def _value(environ: Mapping[str, str], name: str) -> str:
    """A variable without the pair of quotes that some shells' env files leave round it."""
    text = environ.get(name, "").strip()
    if len(text) > 1 and text[0] == text[-1] and text[0] in "\"'":
        return text[1:-1]
    return text


def _read(path: Path) -> tuple[str, str, str] | None:
    """Key, API host and web host; None when there is no file or nothing in it."""
    try:
        hosts = netrc.netrc(path).hosts
    except FileNotFoundError:
        return None
    except netrc.NetrcParseError:
        # The parser's own message may quote the line that holds the key.
        raise Misconfigured(f"{path} is no login file: swanlab login, or set SWANLAB_API_KEY") from None
    except OSError as error:
        raise Misconfigured(f"read {path}: {error.strerror}; mend its permissions, or set SWANLAB_API_KEY") from None
    for machine, (login, _, key) in hosts.items():
        if key:
            return key, host_of(machine), host_of(login)
    return None
