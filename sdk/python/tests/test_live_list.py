"""The live suite holds every check of conformance/live.json, the one list that the SDKs share."""

import json
from pathlib import Path

import pytest

HERE = Path(__file__).parent
CHECKS = json.loads((HERE / "../../../conformance/live.json").read_text())


SUITES = "".join(p.read_text() for p in [*HERE.glob("test_live*.py"), HERE / "test_heavy.py"])


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check["check"])
def test_is_there(check: dict[str, str]) -> None:
    assert f"def {check['python']}(" in SUITES
