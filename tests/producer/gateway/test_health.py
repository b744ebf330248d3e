"""Health, version and the models, without and with workers."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

import inferq

pytestmark = pytest.mark.model


def test_the_models_are_those_of_the_live_workers(http: httpx.Client, gateway: Any) -> None:
    listed = http.get("/v1/models").json()
    assert listed["object"] == "list"
    [model] = listed["data"]
    assert model["id"] == "stand-in"
    assert model["object"] == "model"
    assert model["max_model_len"] == 4096
    assert http.get("/v1/models/stand-in").json() == model
    assert http.get("/health").json()["status"] == "ok"
    assert http.get("/readyz").status_code == 200
    assert http.get("/version").json() == {"version": inferq.__version__}
