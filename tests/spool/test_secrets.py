"""No secret enters the spool, and nothing that only sounds like one is taken out."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

import gapless
from gapless.redact import REDACTED, is_secret_name, scrub_command, scrub_text, scrub_value
from tests.spool.oracle import only
from tests.spool.scripts import environment, patiently, run

HEX40 = "3f786850e387550fdab836ed7e6dc881de23001b"
SHAPES = {
    "wandb": HEX40,
    "wandb local": f"local-{HEX40}",
    "wandb v1": "wandb_v1_" + "aB3" * 25 + "xy",
    "swanlab": "rdYmPZ7vXNrlEU4zEXhwj",
    "openai": "sk-proj-abcdefghijklmnopqrstuvwx",
    "hugging face": "hf_AbCdEfGhIjKlMnOpQrStUvWxYz012345",
    "github": "ghp_AbCdEfGhIjKlMnOpQrStUvWxYz0123456789",
    "github fine-grained": "github_pat_11ABCDEFG0aBcDeFgHiJkLmNoPqRsT",
    "gitlab": "glpat-abcdefghij0123456789",
    "aws": "AKIAIOSFODNN7EXAMPLE",
    "google": "AIza" + "SyA1234567890abcdefghijklmnopqrstuv"[:35],
    "slack": "xoxb-123456789012-abcdefghij",
    "jwt": "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.dozjgNryP4J3jVmNHl0w5N_XgL0n3I9P",
    "pem": "-----BEGIN RSA PRIVATE KEY-----\nMIIEpAIBAAKCAQEA\n-----END RSA PRIVATE KEY-----",
}
NAMES = [
    "api_key",
    "apikey",
    "apiKey",
    "API_KEY",
    "wandb_api_key",
    "X-API-Key",
    "secret",
    "secret_key",
    "client_secret",
    "aws_secret_access_key",
    "access_key",
    "private_key",
    "passwd",
    "password",
    "db_password",
    "token",
    "hf_token",
    "auth_token",
    "access_token",
    "refresh_token",
    "bearer_token",
    "github_token",
    "wandb_token",
    "MY_HF_TOKEN",
    "hub_token",
    "push_to_hub_token",
    "session_token",
    "openai_key",
    "wandb-key",
    "ssh_key",
    "passphrase",
    "aws_credentials",
    "Authorization",
    "trainer.logger.api_key",
    "trainer/logger/token",
]
HARMLESS = {
    "n_tokens": 4096,
    "eos_token": "</s>",
    "pad_token_id": 0,
    "pad_token": "<pad>",
    "tokenizer": "t5",
    "tokenizer_path": "/models/t5",
    "max_tokens": 1024,
    "token_level": "word-level",
    "num_memory_tokens": 16,
    "use_cls_token": True,
    "token": 7,
    "password": None,
    "api_key": "",
    "secrets_manager": "vault-name",
    "key": "value-of-a-key",
    "passwords_seen": "thirteen",
    "git_commit": HEX40,
    "model_revision": HEX40,
    "architecture": "Qwen2ForCausalLanguage",
    "url": "https://host/path?x=1",
    "ssh": "ssh://git@github.com/a/b",
    "sha256": "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
}


@pytest.mark.parametrize("name", NAMES)
def test_credentials_names_are_known(name: str) -> None:
    """The last part of a key decides, whatever its case and separators."""
    assert is_secret_name(name)


@pytest.mark.parametrize("name", [name for name in HARMLESS if name not in ("token", "password", "api_key")])
def test_names_that_only_sound_like_it_are_not(name: str) -> None:
    """Tokens of a model, tokenizers and the like are no credentials."""
    assert not is_secret_name(name)


def test_harmless_settings_survive(tmp_path: Path) -> None:
    """Values under names that only sound like credentials are recorded as they are; numbers always are."""
    with gapless.init("p", dir=tmp_path, config=HARMLESS) as run:
        run.log({"token": 5.0, "n_tokens": 3, "loss/secret": 0.5})
    (record,) = only(run.path, "run")

    assert record.data["config"] == HARMLESS
    assert only(run.path, "metrics")[0].data == {"token": 5.0, "n_tokens": 3, "loss/secret": 0.5}


@pytest.mark.parametrize("secret", SHAPES.values(), ids=SHAPES)
def test_key_shapes_are_found_under_any_name(secret: str) -> None:
    """What looks like a known key is taken out of a value, of a text around it and of a command line."""
    assert secret not in scrub_value(secret, "experiment")
    assert secret not in scrub_value(f"use {secret} to log in", "notes_of_mine")
    assert secret not in " ".join(scrub_command(["train.py", f"--extra={secret}", secret]))


def test_urls_lose_their_user_and_password() -> None:
    """`https://u:p@h/x` keeps its host and path."""
    assert scrub_value("https://u:hunter2@h/x", "tracking_uri") == f"https://{REDACTED}@h/x"
    assert scrub_text("clone https://me:ghs_x@h/r now") == f"clone https://{REDACTED}@h/r now"


@pytest.mark.parametrize(
    ("args", "clean"),
    [
        (["--api-key", "hunter2"], ["--api-key", REDACTED]),
        (["--wandb_api_key=hunter2"], [f"--wandb_api_key={REDACTED}"]),
        (["+trainer.hf_token=hunter2"], [f"+trainer.hf_token={REDACTED}"]),
        (["WANDB_API_KEY=hunter2", "x"], [f"WANDB_API_KEY={REDACTED}", "x"]),
        (["--password", "--verbose"], ["--password", "--verbose"]),
        (["--max_tokens", "5", "--tokenizer=t5"], ["--max_tokens", "5", "--tokenizer=t5"]),
        (["-c", "run(api_key='hunter2', lr=1)"], ["-c", f"run(api_key={REDACTED}, lr=1)"]),
        (["--header", "Authorization: Bearer hunter2hunter2"], ["--header", f"Authorization: Bearer {REDACTED}"]),
    ],
)
def test_command_lines_are_cleaned(args: list[str], clean: list[str]) -> None:
    """Flags, assignments and overrides with a credential's name lose their value."""
    assert scrub_command(args) == clean


def test_no_planted_secret_is_found_in_the_spool(tmp_path: Path) -> None:
    """Neither from configs, objects, notes, tags, summaries, console lines, nor the command line and environment."""
    planted: dict[str, Any] = {f"planted-{number}-secret": name for number, name in enumerate(NAMES)}
    script = """
        import json, sys, types, gapless
        planted, shapes = json.loads(sys.stdin.read())
        class Opaque:
            def __repr__(self): return f"Opaque(api_key='{list(planted)[0]}', lr=1)"
        nested = {}
        for value, name in planted.items():
            nested = {"inner": nested, name: value, "items": [{name: value}, (name, {name: [value]})]}
        config = {"a": nested, "ns": types.SimpleNamespace(password=list(planted)[1]), "o": Opaque(),
                  "shapes": shapes, "text": " ".join(shapes.values()), "bytes": {"token": list(planted)[2].encode()}}
        notes = f"password={list(planted)[3]} {shapes['wandb v1']} https://u:planted-url@h/"
        run = gapless.init("p", dir=sys.argv[1], id="r", config=config, notes=notes, tags=[shapes["hugging face"]],
                           group=shapes["openai"])
        run.config.update(nested)
        run.config["late"] = {"hf_token": list(planted)[4]}
        run.summary["api_key"] = list(planted)[5]
        run.console([f"export WANDB_API_KEY={list(planted)[6]}", f"got {shapes['github']}"])
        run.finish()
        """
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            textwrap.dedent(script),
            str(tmp_path),
            "--wandb-api-key",
            "planted-flag",
            "token=planted-arg",
        ],
        input=json.dumps([planted, SHAPES]),
        env=environment(WANDB_API_KEY="planted-environment", HF_TOKEN="planted-environment"),
        capture_output=True,
        text=True,
        timeout=60,
    )
    spool = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())

    assert done.returncode == 0, done.stderr
    assert b"planted-" not in spool
    assert not [name for name, secret in SHAPES.items() if secret.encode() in spool]
    assert not [name for name, secret in SHAPES.items() if secret in done.stderr]
    assert spool.count(REDACTED.encode()) > 2 * len(NAMES)


def test_the_git_remote_has_no_user(tmp_path: Path) -> None:
    """A remote like https://user:token@host is recorded without its user."""
    repository = tmp_path / "repository"
    (repository / ".git" / "refs" / "heads").mkdir(parents=True)
    (repository / ".git" / "HEAD").write_text("ref: refs/heads/main\n")
    (repository / ".git" / "refs" / "heads" / "main").write_text(HEX40 + "\n")
    (repository / ".git" / "config").write_text(
        '[core]\n\tbare = false\n[remote "origin"]\n\turl = https://me:t0ken@h/r.git\n'
    )
    script = """
        import os, sys, gapless
        os.chdir(sys.argv[2])
        gapless.init("p", dir=sys.argv[1], id="r").finish()
        """
    done = run(patiently(script), tmp_path / "spool", repository)
    (record,) = only(tmp_path / "spool" / "p" / "r", "system")

    assert done.returncode == 0, done.stderr
    assert record.data["git"] == {"commit": HEX40, "branch": "main", "remote": "https://h/r.git"}


def test_texts_under_a_credentials_name_are_redacted_however_deep(tmp_path: Path) -> None:
    """A holder with a value and its description; a bare `token` may as well hold a tokenizer's settings."""
    config = {
        "password": {"v": "hunter2", "n": 3, "list": ["hunter2"]},
        "token": {"eos": "</s>"},
        "args": ["--api-key", "hunter2", "--lr", "0.1", "--max_tokens", "many"],
        "flag": "--hf_token=hunter2",
        "url": "postgres://h/db?password=hunter2&sslmode=on&token=hunter2#x",
        "prompt": "the password: say it",
    }
    with gapless.init("p", dir=tmp_path, config=config) as run:
        run.console(["Authorization: Bearer hunter2", "all is well"])
    (record,) = only(run.path, "run")

    assert record.data["config"] == {
        "password": {"v": REDACTED, "n": 3, "list": [REDACTED]},
        "token": {"eos": "</s>"},
        "args": ["--api-key", REDACTED, "--lr", "0.1", "--max_tokens", "many"],
        "flag": f"--hf_token={REDACTED}",
        "url": f"postgres://h/db?password={REDACTED}&sslmode=on&token={REDACTED}#x",
        "prompt": "the password: say it",
    }
    assert "hunter2" not in "".join(path.read_text() for path in run.path.glob("*.jsonl"))
