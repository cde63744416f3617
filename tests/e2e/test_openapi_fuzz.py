"""Whatever the OpenAPI documents allow is answered, and never with a 500."""

from __future__ import annotations

from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from lockstep.gateway.openapi.control_docs import CONTROL_ROUTE_DOCS
from lockstep.gateway.openapi.document import ROUTE_DOCS
from tests.processes import TOKEN, ServeProcess

ROUTES = sorted({one.path for one in ROUTE_DOCS if one.method == "POST"})
FUZZ = settings(
    max_examples=40,
    deadline=None,
    database=None,
    derandomize=True,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
ADMIN = {"authorization": f"Bearer {TOKEN}"}
SHORT = {"drain_seconds": 0, "lease_seconds": 1}
SLOW = ("/v1/rl/workers", "/v1/rl/init_broadcaster")
SHORT_GROUP = {"host": "127.0.0.1", "port": 9, "timeout": 0.2}
"""Instead of what would only wait: for requests that end, for a trainer that is not there."""


def check_error(response: Any) -> None:
    if response.status_code >= 400:
        assert response.json()["error"]["message"]


@pytest.mark.parametrize("path", ROUTES)
def test_no_request_within_the_schema_gets_a_5xx(served: ServeProcess, path: str) -> None:
    schema = schemathesis.openapi.from_url(f"{served.url}/openapi.json")
    strategy = schema[path]["POST"].as_strategy()

    @FUZZ
    @given(case=strategy, keep=st.booleans())
    def one(case: schemathesis.Case, keep: bool) -> None:
        if isinstance(case.body, dict):
            case.body.pop("stream", None)
            if not keep:
                case.body.pop("model", None)
        response = case.call(timeout=60)
        assert response.status_code < 500, response.text
        check_error(response)

    one()


@pytest.mark.parametrize("name", ["openapi.json", "docs"])
def test_the_control_plane_describes_itself_only_to_its_token(
    served: ServeProcess, name: str
) -> None:
    import requests

    url = f"{served.admin_url}/{name}"
    assert requests.get(url, timeout=30).status_code == 401
    assert requests.get(url, timeout=30, headers=ADMIN).status_code == 200


@pytest.mark.parametrize(
    ("method", "path"), sorted({(one.method, one.path) for one in CONTROL_ROUTE_DOCS})
)
def test_no_change_within_the_schema_gets_a_500(
    served: ServeProcess, method: str, path: str
) -> None:
    schema = schemathesis.openapi.from_url(f"{served.admin_url}/openapi.json", headers=ADMIN)

    slow = path in SLOW and method == "POST"

    @settings(FUZZ, max_examples=8 if slow else 25)
    @given(case=schema[path][method].as_strategy())
    def one(case: schemathesis.Case) -> None:
        for part in (case.body, case.query):
            if isinstance(part, dict) and not SHORT.keys().isdisjoint(part):
                part |= {name: SHORT[name] for name in SHORT.keys() & part.keys()}
        if path.endswith("init_broadcaster") and isinstance(case.body, dict):
            case.body |= SHORT_GROUP
        response = case.call(timeout=60, headers=ADMIN)
        # 502 and 503 say that a worker could not do it, and why.
        assert response.status_code < 500 or response.status_code in (502, 503), response.text
        check_error(response)

    one()
