"""`gapless.toml`, flags and the page that documents them."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import click
import pytest

from gapless_uploader import metrics_port
from gapless_uploader.budget import Limits, Rate
from gapless_uploader.cli import main
from gapless_uploader.config import UploaderConfig, load_config
from gapless_uploader.sink import Misconfigured
from gapless_uploader.sinks import make_sink

PAGE = (Path(__file__).parents[2] / "docs" / "uploader.md").read_text()


def written(folder: Path, text: str) -> Path:
    path = folder / "gapless.toml"
    path.write_text(text)
    return path


def test_a_whole_file(tmp_path: Path):
    """Every option is read as it is written."""
    path = written(
        tmp_path,
        'to = ["file:out"]\nstate = "~/s"\nworkers = 2\ncall_timeout_s = 30\non_rewind = "mark"\nrate = "5/s"\n'
        'project = ["a*"]\n[sinks.file]\nbandwidth = "1MB/s"\n',
    )
    config = load_config(path)

    assert (config.to, config.workers, config.call_timeout_s, config.on_rewind) == (("file:out",), 2, 30, "mark")
    assert config.state == Path("~/s").expanduser()
    assert config.options().budgets == {"file": Limits(Rate(5, 1), Rate(1e6, 1))}
    assert [sink.target for sink in config.make_sinks()] == [str(Path("out").resolve())], (
        "a budget is no option of the sink itself"
    )


def test_a_kind_has_its_own_rate(tmp_path: Path):
    """A rate in the table of a kind takes the place of the rate for all."""
    config = load_config(written(tmp_path, 'to = ["file", "memory"]\nrate = "5/s"\n[sinks.file]\nrate = "1/s"\n'))

    assert config.limits("file").requests == Rate(1, 1)
    assert config.limits("memory").requests == Rate(5, 1)


def test_a_flag_is_above_the_file(tmp_path: Path):
    """What a flag says counts, above the file and above each kind's table; what it does not say stays."""
    path = written(tmp_path, 'to = ["file"]\nworkers = 2\n[sinks.file]\nrate = "1/s"\nbandwidth = "1kB/s"\n')
    config = load_config(path, workers=7, rate="9/s", bandwidth=None, run=())

    assert config.workers == 7
    assert config.limits("file") == Limits(Rate(9, 1), Rate(1e3, 1))


def test_no_file_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Without a file in the working folder the defaults hold; a file that was named must be there."""
    monkeypatch.chdir(tmp_path)
    assert load_config(None) == UploaderConfig()
    with pytest.raises(Misconfigured, match=r"read .*missing\.toml"):
        load_config(tmp_path / "missing.toml")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("workers = 0", "workers is 0"),
        ("workers = 1.5", "workers is 1.5"),
        ("workers = true", "workers is True"),
        ('call_timeout_s = "long"', "call_timeout_s is 'long'"),
        ("slow_scan_s = inf", "slow_scan_s is inf"),
        ('on_rewind = "guess"', "on_rewind is 'guess'"),
        ('rate = "fast"', "rate is 'fast'"),
        ("rate = 5", "rate is 5"),
        ('bandwidth = "1MB"', "bandwidth is '1MB'"),
        ("metrics_port = 70000", "metrics_port is 70000"),
        ("state = 5", "state is 5"),
        ('state = ""', "state is ''"),
        ('[sinks.file]\nrate = "fast"', "[sinks.file] rate is 'fast'"),
        ('to = "file"', "to must be a list"),
        ("project = [1]", "project must be a list"),
        ("sinks = 1", "sinks must be tables"),
        ("[sinks]\nfile = 1", "sinks must be tables"),
        ("speed = 9", "no option 'speed'"),
        ("workers = ", "read "),
    ],
)
def test_a_mistake_names_file_and_key(tmp_path: Path, text: str, says: str):
    """A wrong value, type, key or syntax is said with the file, the key and the value."""
    path = written(tmp_path, text)
    with pytest.raises(Misconfigured, match=re.escape(str(path))) as raised:
        load_config(path)

    assert says in str(raised.value)


# the page


def documented() -> dict[str, str]:
    """Option -> default, of the page's table."""
    table = PAGE.partition("| option | default |")[2].partition("\n\n")[0]
    return dict(re.findall(r"^\| `(\w+)` \| ([^|]+) \|", table, re.MULTILINE))


def test_every_option_has_its_row():
    """Every field of the config is in the page's table, with its default where that is a plain value."""
    rows = documented()
    for field in fields(UploaderConfig):
        assert field.name in rows
        if isinstance(field.default, int | float):
            assert rows[field.name].strip() == f"{field.default:g}"
        elif isinstance(field.default, str):
            assert rows[field.name].strip() == f"`{field.default}`"


def test_every_option_of_a_command_has_help():
    """Each flag of watch, replay and status says what it does, and each command has an example."""
    for name in ("watch", "replay", "status"):
        command = main.commands[name]
        assert command.help is not None
        assert f"Example: gapless {name} " in command.help
        for param in command.params:
            if isinstance(param, click.Option):
                assert param.help, f"{name} {param.name}"


def test_every_command_on_the_page_exists():
    """Every `gapless` command line of the page is one that the command knows, with flags that it has."""
    lines = re.findall(r"^\$ gapless (\w+) ([^\n|#]*)", PAGE, re.MULTILINE)
    assert lines
    for name, rest in lines:
        known = {opt for param in main.commands[name].params for opt in param.opts}
        assert set(re.findall(r"--[\w-]+", rest)) <= known


def test_every_metric_is_on_the_page():
    """The page names every metric that is served, and no other."""
    names = set(metrics_port._FAMILIES)

    assert set(re.findall(r"gapless_\w+", PAGE.partition("## Metrics")[2].partition("## Options")[0])) == names


def test_a_target_is_no_option_of_a_named_sink() -> None:
    """It stands behind the colon; the message lists what there is."""
    with pytest.raises(Misconfigured, match="sink 'tensorboard' has no option 'target'; there are: precision"):
        make_sink("tensorboard", {"target": "x"})
