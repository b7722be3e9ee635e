"""Which verify replica gets the next request."""

from paceline.types import ModelInfo
from router.replicas import ModelFacts, Replica, Replicas


def told(replicas: Replicas, *fingerprints: str) -> None:
    """As if every replica had answered."""
    for replica, fingerprint in zip(replicas.seen(), fingerprints, strict=True):
        info = ModelInfo(
            "tiny", fingerprint, "words", 512, 256, "float32", "cpu", "lean", "", "deterministic"
        )
        replica.facts, replica.problem = ModelFacts(info, (2,)), ""
        replica.asked.set()


async def served(replicas: Replicas, requests: int) -> list[str]:
    """What the router does for requests that come one after the other."""
    picked = []
    for _ in range(requests):
        facts = await replicas.facts()
        picked.append((await replicas.pick(facts.identity)).address)
    return picked


async def test_replicas_without_load_take_turns():
    """Looking at what a replica serves is no turn of its own; two models side by side take turns too."""
    for fingerprints in (("a", "a"), ("a", "b")):
        replicas = Replicas(["127.0.0.1:1", "127.0.0.1:2"], "words")
        told(replicas, *fingerprints)
        assert await served(replicas, 4) == ["127.0.0.1:1", "127.0.0.1:2"] * 2
        await replicas.stop()


async def test_an_answer_from_before_a_break_does_not_make_a_replica_usable():
    """It is asked again at once, and used when that answer is good."""
    answered: list[bool] = []

    class Breaking(Replicas):
        async def _look(self, replica: Replica) -> str:
            answered.append(replica.usable)
            if len(answered) == 1:
                self.lost(replica, "the stream broke")
            return ""

    replicas = Breaking(["127.0.0.1:1"], "words")
    (replica,) = replicas.seen()
    replica.problem = ""
    replicas.start()
    await replica.asked.wait()
    assert answered == [True, False]
    assert replica.usable
    await replicas.stop()
