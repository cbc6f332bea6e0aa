"""The dashboard and the alerts ask for metrics and labels that there are, in PromQL that is one."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from made_states import arm, put, state, target

from h2d_patch.operate.prometheus import FAMILIES, scrape

ROOT = Path(__file__).resolve().parents[2]
DASHBOARD = json.loads((ROOT / "grafana/h2d_patch.json").read_text(encoding="utf-8"))
ALERTS = (ROOT / "grafana/alerts.yml").read_text(encoding="utf-8")
# What Grafana puts in place of its variables.
VARIABLES = {"$__rate_interval": "5m", "$server": ".*", "$fix": ".*"}


def expressions() -> Iterator[str]:
    for panel in DASHBOARD["panels"]:
        for asked in panel["targets"]:
            text: str = asked["expr"]
            for name, value in VARIABLES.items():
                text = text.replace(name, value)
            yield text


def alerts() -> list[dict[str, Any]]:
    yaml = pytest.importorskip("yaml")
    rules: list[dict[str, Any]] = yaml.safe_load(ALERTS)["groups"][0]["rules"]
    return rules


def all_expressions() -> list[str]:
    return [*expressions(), *(rule["expr"] for rule in alerts())]


def test_every_metric_that_is_asked_for_is_exported_and_every_one_exported_is_asked_for() -> None:
    asked = set(re.findall(r"h2d_patch_\w+", " ".join(all_expressions())))
    families = {re.sub(r"_(bucket|sum|count)$", "", name) if name not in FAMILIES else name for name in asked}
    assert families == set(FAMILIES)
    for name in asked - set(FAMILIES):
        assert FAMILIES[re.sub(r"_(bucket|sum|count)$", "", name)][0] == "histogram"


def test_every_label_that_is_asked_for_is_exported(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    arms = {"on": arm(1), "off": arm(1)}
    put(tmp_path, state(target(arms=arms, paths={"x": 1}, fallback_reasons={"y": 1}), device={"staging_bytes": 1}))
    exported = set(re.findall(r'[{,](\w+)="', scrape(tmp_path)))
    for text in all_expressions():
        by = [name.strip() for names in re.findall(r"\bby \(([^)]*)\)", text) for name in names.split(",")]
        assert set(by) | set(re.findall(r'[{,](\w+)=~?"', text)) <= exported, text
    legends = re.findall(r"\{\{(\w+)\}\}", json.dumps(DASHBOARD)) + re.findall(r"\$labels\.(\w+)", ALERTS)
    assert set(legends) <= exported
    for variable in DASHBOARD["templating"]["list"][1:]:
        metric, label = re.fullmatch(r"label_values\((\w+), (\w+)\)", variable["query"]["query"]).groups()  # type: ignore[union-attr]
        assert metric in FAMILIES and label in exported


def test_every_expression_is_promql() -> None:
    parser = pytest.importorskip("promql_parser")
    for text in all_expressions():
        assert "$" not in text
        parser.parse(text)
    with pytest.raises(Exception, match="."):
        parser.parse("sum by (fix) (rate(x))[5m")


def test_a_counter_s_rate_is_taken_before_it_is_summed() -> None:
    """The other way round, a process that ends would look like a counter that began anew."""
    for text in all_expressions():
        for name in re.findall(r"(\w*)\(*h2d_patch_\w+(?:_total|_bucket|_sum|_count)\b", text):
            assert name == "rate", text


def test_panels_have_ids_and_places_of_their_own() -> None:
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken and at["x"] + at["w"] <= 24, panel["title"]
        taken |= cells
        assert panel["datasource"]["uid"] == "${datasource}"


def test_an_alert_says_what_is_wrong() -> None:
    for rule in alerts():
        assert rule["annotations"]["summary"] and rule["for"] and rule["labels"]["severity"]
