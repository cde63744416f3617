"""Version labels: what one may hold, and that none is ever cut apart wrongly."""

from __future__ import annotations

import pytest

from lockstep.fleet.control.accepted_versions import AcceptedVersions
from lockstep.tokens import VersionSpan
from lockstep.tokens.errors import BadRequest, Unavailable
from lockstep.tokens.versions import (
    MAX_LABEL,
    VersionLabel,
    check_adapter_name,
    check_label,
    joined,
)

GOOD = ["a", "step_1", "step-12-9f3c", "2026-01-02T03:04", "v1.2@main", "_x", "lr=1e-4", "a" * 128]
BAD = ["", "a+b", "a\nb", "\x1b[31mred", "a b", "[/bold]", "x" * 100_000, "é", "-a", ".a", "a\x00",
       "a/b", "a,b", "a" * 129, "a\n"]  # fmt: skip


@pytest.mark.parametrize("label", GOOD)
def test_labels_that_people_give_are_taken(label: str) -> None:
    assert check_label(label) == label


@pytest.mark.failure_mode("F50")
@pytest.mark.parametrize("label", BAD)
def test_a_label_that_could_be_misread_is_refused_in_words_that_can_be_printed(label: str) -> None:
    with pytest.raises(BadRequest) as refused:
        check_label(label, "version")
    assert refused.value.param == "version"
    assert len(refused.value.message) < 300
    assert refused.value.message.isprintable()
    assert refused.value.message.isascii()


@pytest.mark.failure_mode("F50")
@pytest.mark.parametrize("name", ["", "a@b", "a+b", "a\nb", "x" * (MAX_LABEL + 1), "[/bold]"])
def test_a_name_of_an_adapter_that_could_be_misread_is_refused(name: str) -> None:
    with pytest.raises(BadRequest, match="lora_name"):
        check_adapter_name(name)
    assert check_adapter_name("org/adapter-1") == "org/adapter-1"


@pytest.mark.failure_mode("F50")
@pytest.mark.parametrize("weights", [*GOOD, "1.0+cu128", "odd + label", "a+b@c+d", "two\nlines"])
def test_what_is_joined_comes_apart_again_and_nothing_else_does(weights: str) -> None:
    label = joined(weights, "org/x", "step-1@2.0a1b2c")
    assert VersionLabel.parse(label) == VersionLabel(weights, "org/x", "step-1@2.0a1b2c")
    assert str(VersionLabel.parse(label)) == label
    assert VersionLabel.parse(weights) == VersionLabel(weights)


@pytest.mark.failure_mode("F50")
@pytest.mark.parametrize("version", ["step_1", "1.0+cu128", "1.0+cu@128"])
def test_answers_under_an_agreed_label_are_taken_whatever_it_holds(version: str) -> None:
    accepted = AcceptedVersions()
    accepted.accept("before")
    accepted.accept(version)
    since = accepted.mark()
    for label in (version, joined(version, "x", "1")):
        accepted.check_spans([VersionSpan(label, 0, 1)], since, "w0")
    for label in ("1.0", "other", joined("other", "x", "1"), "before"):
        with pytest.raises(Unavailable, match="the fleet accepted"):
            accepted.check_spans([VersionSpan(label, 0, 1)], since, "w0")


@pytest.mark.failure_mode("F75")
async def test_a_gateway_that_follows_looks_before_it_refuses_a_version_that_it_does_not_know() -> (
    None
):
    accepted = AcceptedVersions()
    accepted.follow(["v1"])
    versions = ["v1"]
    looks = 0

    async def read_anew() -> None:
        nonlocal looks
        looks += 1
        accepted.follow(versions)

    accepted.read_anew = read_anew
    since = accepted.mark()
    await accepted.learn([VersionSpan("v1", 0, 1)], since)
    assert looks == 0
    for label, known in (("v2", False), ("v2", True)):
        if known:
            versions.append("v2")
        await accepted.learn([VersionSpan(label, 0, 1)], since)
        if known:
            accepted.check_spans([VersionSpan(label, 0, 1)], since, "w0")
        else:
            with pytest.raises(Unavailable):
                accepted.check_spans([VersionSpan(label, 0, 1)], since, "w0")
    assert looks == 2
    accepted.follow(["v1", "v2"])  # nothing new
    accepted.follow(["v1", "v2", "v1"])  # back to an earlier one
    accepted.check_spans([VersionSpan("v1", 0, 1)], accepted.mark(), "w0")
    with pytest.raises(Unavailable):
        accepted.check_spans([VersionSpan("v2", 0, 1)], accepted.mark(), "w0")
