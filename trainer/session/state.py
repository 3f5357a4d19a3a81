"""What a worker has been told and has said: another master is told it when it takes over."""

from __future__ import annotations

from edl.contract.proto import edl_pb2 as pb


class SessionState:
    """What a master knows of this worker: the last ring it was ordered into, and how that went."""

    def __init__(self) -> None:
        self.generation = 0
        self._members: tuple[int, ...] = ()
        self._ready: pb.Ready | None = None
        self._up, self._left = False, False
        self._out: pb.LeftRing | None = None

    @property
    def ready(self) -> bool:
        """Whether it has said that it is; else there is nothing to tell."""
        return self._ready is not None

    def form(self, generation: int, members: tuple[int, ...]) -> None:
        """It was ordered into this ring."""
        self.generation, self._members, self._up, self._left = generation, members, False, False

    def note(self, message: pb.FromWorker) -> None:
        """It said this, whether or not anybody heard."""
        match message.WhichOneof("body"):
            case "ready":
                self._ready = message.ready
            case "joined_ring" if message.generation == self.generation:
                self._up = True
            case "left_ring":
                self._out, self._left = message.left_ring, message.generation == self.generation

    def resume(self) -> pb.Resume:
        """All of it, for the new master."""
        assert self._ready is not None
        return pb.Resume(
            records=self._ready.records,
            members=self._members,
            joined=self._up,
            left=self._left,
            left_ring=self._out,
        )
