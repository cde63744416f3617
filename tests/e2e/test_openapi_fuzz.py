"""Whatever the OpenAPI document allows is answered, and never with a 5xx."""

from __future__ import annotations

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.processes import ServeProcess

ROUTES = ("/inference/v1/generate", "/v1/chat/completions", "/v1/completions", "/tokenize",
          "/detokenize", "/v1/chat/completions/tokens")  # fmt: skip


@pytest.mark.parametrize("path", ROUTES)
def test_no_request_within_the_schema_gets_a_5xx(served: ServeProcess, path: str) -> None:
    schema = schemathesis.openapi.from_url(f"{served.url}/openapi.json")
    strategy = schema[path]["POST"].as_strategy()

    @given(case=strategy, keep=st.booleans())
    @settings(
        max_examples=40,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    def one(case: schemathesis.Case, keep: bool) -> None:
        if isinstance(case.body, dict):
            case.body.pop("stream", None)
            if not keep:
                case.body.pop("model", None)
        response = case.call(timeout=60)
        assert response.status_code < 500, response.text
        if response.status_code >= 400:
            assert response.json()["error"]["message"]

    one()
