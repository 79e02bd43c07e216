"""The sinks that show the present: Prometheus's own scrape, and RL-Insight."""

import json
from dataclasses import replace
from math import inf, nan
from pathlib import Path
from urllib.request import urlopen

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from gapless_uploader.operations import Config, Rewind, State
from gapless_uploader.sink import Misconfigured, Retryable
from gapless_uploader.sinks.prometheus import PrometheusSink
from gapless_uploader.sinks.rl_insight import RlInsightSink
from tests.sinks.harness import amend, row, view, write
from tests.sinks.harness_rl_insight import Harness as RlInsightHarness
from tests.sinks.harness_rl_insight import port, server, targets
from tests.sinks.proxy import Fault, FaultProxy

RUN = view(config={"lr": 0.1})


def scrape(sink: PrometheusSink) -> dict[str, list[tuple[dict[str, str], float]]]:
    with urlopen(f"http://127.0.0.1:{sink.port}/metrics") as answer:
        assert answer.headers["Content-Type"].startswith("text/plain; version=")
        families = list(text_string_to_metric_families(answer.read().decode()))
    return {family.name: [(one.labels, one.value) for one in family.samples] for family in families}


def test_a_scrape_has_values_steps_and_states() -> None:
    """Each metric is a gauge with project, run, name and true key; the step and the state have theirs."""
    sink = PrometheusSink("127.0.0.1:0")
    write(sink, RUN, {}, Config(RUN.config), row(7, **{"val/mean@1": 0.5}), State("finished", 0, 0.0, 0.0))
    found = scrape(sink)
    sink.close()
    run = {"project": "grpo", "run": "r-1", "name": "Qwen 7B"}

    assert found == {
        "gapless_run_state": [({**run, "state": "finished"}, 1.0)],
        "gapless_step": [(run, 7.0)],
        "gapless_val_mean_1": [({**run, "key": "val/mean@1"}, 0.5)],
    }


def test_an_older_step_never_takes_a_newer_ones_place() -> None:
    """A late record and an amended old step leave the newest value where it is."""
    sink = PrometheusSink("127.0.0.1:0")
    memo = write(sink, RUN, {}, row(1, loss=1.0), row(9, loss=9.0)).memo
    memo = write(sink, RUN, memo, row(5, loss=5.0), amend(row(1, loss=1.0), loss=2.0, other=3.0)).memo
    found = scrape(sink)
    sink.close()

    assert [value for _, value in found["gapless_loss"]] == [9.0]
    assert [value for _, value in found["gapless_other"]] == [3.0]


def test_a_new_process_serves_the_last_values_at_once() -> None:
    """The memo brings values, NaN and infinity included, and the state, before the next row comes."""
    first = PrometheusSink("127.0.0.1:0")
    ended = State("failed", 1, 0.0, 0.0)
    memo = json.loads(json.dumps(write(first, RUN, {}, row(3, a=nan, b=inf, c=0.5), ended).memo))
    first.close()
    second = PrometheusSink("127.0.0.1:0")
    second.open(replace(RUN, state="failed"), memo).close()
    found = scrape(second)
    second.close()

    assert {name: repr(found[name][0][1]) for name in ("gapless_a", "gapless_b", "gapless_c")} == {
        "gapless_a": "nan",
        "gapless_b": "inf",
        "gapless_c": "0.5",
    }
    assert [labels["state"] for labels, _ in found["gapless_run_state"]] == ["failed"]


def test_what_was_taken_back_is_not_served() -> None:
    """A key whose last value was rewound is gone until it comes again."""
    sink = PrometheusSink("127.0.0.1:0")
    write(sink, RUN, {}, row(1, loss=1.0), row(9, best=9.0), Rewind(5))
    found = scrape(sink)
    sink.close()

    assert "gapless_best" not in found
    assert [value for _, value in found["gapless_loss"]] == [1.0]


def test_a_port_in_use_is_said() -> None:
    """Two sinks cannot listen on one port; the second says which."""
    first = PrometheusSink("127.0.0.1:0")
    first.open(RUN, {})
    with pytest.raises(Misconfigured, match=f"listen on 127.0.0.1:{first.port}"):
        PrometheusSink(f"127.0.0.1:{first.port}").open(RUN, {})
    first.close()


@pytest.mark.parametrize("target", ["nine", "host:", ":9109", "host:x"])
def test_a_target_that_is_no_address_is_named(target: str) -> None:
    """The target is a host and a port."""
    with pytest.raises(Misconfigured, match="host:port"):
        PrometheusSink(target)


# RL-Insight


def test_gauges_have_verls_names_and_the_server_knows_them(tmp_path: Path) -> None:
    """Names are verl's under rl-insight's namespace, and the real server scrapes this process from now on."""
    harness = RlInsightHarness(tmp_path)
    write(harness.sink(), RUN, {}, row(1, **{"actor/loss": 0.5}))
    with urlopen(f"http://127.0.0.1:{port()}/metrics") as answer:
        families = {family.name: family for family in text_string_to_metric_families(answer.read().decode())}
    (sample,) = families["rl_insight_monitor_actor_loss"].samples
    harness.close()

    assert sample.value == 0.5
    assert sample.labels == {"project": "grpo", "experiment_name": "Qwen 7B", "run": "r-1", "key": "actor/loss"}
    registered = [one for group in yaml.safe_load(targets().read_text()) for one in group["targets"]]
    assert registered == [f"127.0.0.1:{port()}"]


def test_an_rl_insight_server_that_fails_is_asked_again(tmp_path: Path) -> None:
    """An outage is Retryable; an address that is no RL-Insight server is a wrong setting."""
    host, _, server_port = server().removeprefix("http://").partition(":")
    proxy = FaultProxy(host, int(server_port))
    proxy.faults = [Fault("/targets", 503), Fault("/targets"), Fault("/targets", 404)]
    sink = RlInsightSink(proxy.url, listen="127.0.0.1", port=port())
    for kind in (Retryable, Retryable, Misconfigured):
        with pytest.raises(kind):
            sink.open(RUN, {})
    sink.open(RUN, {}).close()
    proxy.close()


def test_rl_insight_without_a_server_says_how_to_name_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """No URL anywhere is a wrong setting with the way out."""
    monkeypatch.delenv("RL_INSIGHT_SERVER_URL", raising=False)
    with pytest.raises(Misconfigured, match="RL_INSIGHT_SERVER_URL"):
        RlInsightSink().open(RUN, {})
