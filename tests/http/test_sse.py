"""Server-sent events are cut the same way wherever the network cut them."""

from __future__ import annotations

import pytest

from lockstep.http.sse import EventReader

STREAMS = [
    b'data: {"a":1}\n\ndata: {"b":2}\n\ndata: [DONE]\n\n',
    b'data: {"a":1}\n\ndata: {"b":2}\n\n',
    b'data: {"a":1}\r\n\r\ndata: {"b":2}\r\n\r\ndata: [DONE]\r\n\r\n',
    b"data: one\ndata: two\n\ndata:three\n\n",
    b": comment\n\nid: 7\ndata: x\n\nevent: y\ndata: z\n\n",
    b"data: x\n\n: ping\n\ndata: z\n\n",
    b"data: a\n\ndata: [DONE]\n\ndata: b\n\n",
    b"data: \n\ndata: x\n\n",
    b"data: a\n\n\ndata: b\n\n",
    b"data: a\nid: 3\n\ndata: b\n\n",
]


def read(*chunks: bytes) -> tuple[list[bytes], bool]:
    reader = EventReader()
    return [event for chunk in chunks for event in reader.feed(chunk)], reader.done


@pytest.mark.parametrize("stream", STREAMS)
def test_every_cut_gives_the_same_events(stream: bytes) -> None:
    expected = read(*[stream[at : at + 1] for at in range(len(stream))])
    assert read(stream) == expected
    for at in range(1, len(stream)):
        assert read(stream[:at], stream[at:]) == expected, at
