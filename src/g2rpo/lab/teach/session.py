"""Teaching a model by choosing among its pictures. Independent of any page.

A round: a group of pictures of one prompt is shown, which differ by the noise of one step; the prompt is the one of several
whose pictures differ most; a person answers; the head
(`rewards.taste`) is fitted again to all answers; and the model takes `UPDATES` iterations of its algorithm on the reward
`clicks`, with the recipe's rewards as guards. Everything is a function of the config and of the answers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from typing import Any

import torch
from torch import Tensor

from g2rpo.algorithms.g2rpo import GranularGRPO
from g2rpo.core.errors import UserError
from g2rpo.core.images import to_uint8
from g2rpo.core.plain import checked_as
from g2rpo.core.seeding import generator_for
from g2rpo.core.types import Cond, Example, Rollout
from g2rpo.evaluation.heldout import Comparison
from g2rpo.lab.teach.brake import LOOK, Brake, put_back, weights_of
from g2rpo.monitor.clips import seconds_of, stills
from g2rpo.monitor.scores import save_pictures
from g2rpo.prompts.order import PromptOrder
from g2rpo.rewards import votes
from g2rpo.rewards.clicks import Clicks
from g2rpo.rewards.taste import Choice, Head, features_of, fit
from g2rpo.rewards.votes import Vote
from g2rpo.rollout.guidance import in_training
from g2rpo.rollout.scoring import decode
from g2rpo.training.collector import RolloutSpec
from g2rpo.training.trainer import Trainer

FIRST = 3
"""Answered groups before the weights change."""
UPDATES = 4
"""Iterations after an answer, once there is a head that counts."""
SHOWN_STEPS = (0, 1)
"""Steps whose noise the groups that are shown differ by, by turns: that of later steps changes little that a person can see."""
CANDIDATES, PREVIEWED = 6, 3
"""Prompts that a round considers, and pictures that are drawn of each to find the one to ask about: where twelve pictures are
alike there is nothing to choose, and three tell it nearly as well as twelve (LOG.md)."""
USUAL = 20
"""Answers of a session of usual length, which is the one that was measured (docs/teach.md)."""
ENOUGH, HOPELESS = 12, 0.6
"""After so many groups a head that agrees less with the person is said not to know the taste."""
AIM = 0.75
"""Standard deviations within groups by which the head's utility of held-out pictures is to rise, at strength 1: a model that
learns on loses what a prompt asks for (LOG.md)."""
DIRECT = 4
"""Groups of an update that learns from the clicks alone."""
PROMPTS = 64
"""Training prompts, at most, that groups are drawn from."""
OVERRIDES = (
    "policy.tuning=lora",
    "algorithm.name=g2rpo",
    "algorithm.granularities=[1]",
    "algorithm.branch_steps=[0,1,2]",
    "algorithm.branch_schedule=turns",
    "sampling.tails.forecast=true",
    "trainer.prompts_per_iteration=4",
    "optim.decay=constant",
    "optim.ema_decay=0",
    "evaluation.num_prompts=96",
    "evaluation.controls=false",
    "alarms.decline=off",
    "alarms.hacking=off",
)
"""What a session changes in a recipe, before the user's overrides. The two alarms compare scores of the reward `clicks`, whose
meaning changes with every answer."""


@dataclass(frozen=True)
class Group:
    """Pictures [G, 3, H, W] in [0, 1], or clips, of one prompt, on which a person is asked."""

    round: int
    prompt: str
    step: int
    images: Tensor
    rollout: Rollout
    digest: str
    changes: int
    """How often the weights had changed when it was sampled."""


@dataclass(kw_only=True)
class Session:
    """Rounds of a `trainer` that has a reward `clicks`; not thread-safe. All its ranks act on the same answers.

    `ahead` groups lie ready: group r is sampled after the answer to group r - ahead, whenever that comes. `notify` is called
    with what a person should know.
    """

    trainer: Trainer
    ahead: int = 1
    notify: Callable[[str], None] = print
    head: Head | None = None
    next: int = 0
    """The round that is to be answered."""
    strength: float = 1.0
    """The multiple of `AIM` at which learning pauses; without a head, a factor of the learning rate."""
    brake: Brake = field(init=False)
    direct: bool = False
    """Whether the model learns from the clicks alone, without a head."""
    groups: dict[int, Group] = field(default_factory=dict)
    changes: int = 0
    """How often the weights have changed."""
    _choices: dict[int, Choice] = field(default_factory=dict)
    _waiting: list[tuple[Group, Vote]] = field(default_factory=list)
    _before: list[tuple[int, Any]] = field(default_factory=list)
    _drawn: dict[str, tuple[Tensor, int, Tensor]] = field(default_factory=dict)
    """By prompt: the base's picture; the last one, after how many changes of the weights; and that."""
    _heldout: tuple[dict[str, Tensor], dict[str, Tensor]] | None = None
    """Features of held-out pictures, of the base and of the last good look."""

    def __post_init__(self) -> None:
        t = self.trainer
        if not isinstance(t.algorithm, GranularGRPO):
            raise UserError(
                f"teach: learns by G2RPO; algorithm.name={getattr(t.algorithm, 'name', '?')} has no groups to choose in"
            )
        if not isinstance(t.rewards.get("clicks"), Clicks):
            raise UserError("teach: the recipe needs the reward `clicks`; add rewards.clicks=1")
        self.clicks.encoder = next((one for one in t.evaluator.judged_by.values() if hasattr(one, "features")), None)
        self.rate = t.learner.config.learning_rate
        known = dict.fromkeys(t.order.batch(0, PROMPTS))  # training begins with them, so they are encoded ahead
        self.order = PromptOrder(list(known), t.config.trainer.seed + 1)

    @property
    def clicks(self) -> Clicks:
        reward = self.trainer.rewards["clicks"]
        assert isinstance(reward, Clicks)
        return reward

    @contextmanager
    def begun(self) -> Iterator[None]:
        """While entered, rows are logged. Evaluates the base and samples the first groups; earlier answers in the run's
        votes.jsonl are repeated first."""
        t = self.trainer
        with t.listening():
            t.evaluate()
            self.brake = Brake(weights_of(t))
            self._fill()
            if t.files.writes:
                t.files.run.votes.touch()  # by which a session is known, before its first answer too
            if answers := self._of_main(
                lambda: [each.model_dump() for each in votes.read(t.files.run.votes)] if t.files.writes else []
            ):
                self.repeat([Vote.model_validate(each, strict=False) for each in answers], written=True)
            yield

    @property
    def answered(self) -> int:
        """Groups that were answered with a picture."""
        return len(self._choices)

    @property
    def group(self) -> Group:
        """The group that is to be answered."""
        return self.groups[self.next]

    @property
    def moved(self) -> float:
        """The rise of the head's utility of held-out pictures at the last good look, in standard deviations within groups."""
        if self.head is None or self._heldout is None:
            return 0.0
        base, now = (float(self.head(features).mean()) for features in self._heldout)
        return now - base

    @property
    def reached(self) -> bool:
        """Whether held-out pictures are as far as they should be by the head, so that nothing more is learnt."""
        return not self.direct and self.moved >= AIM * self.strength

    def answer(self, liked: Sequence[int] = (), *, round: int, skipped: bool = False, seconds: float = 0.0) -> Vote:
        """Stores a person's answer to the group of `round` and learns from it; UserError if it cannot be one."""
        return self.take(self.vote_on(round, liked, skipped, seconds))

    def undo(self) -> Vote:
        """Takes back the last answer and what the weights learnt from it; UserError if there is none that can be."""
        return self.take(self.vote(kind="undo", round=self.next))

    def set_strength(self, strength: float) -> Vote:
        """Sets `strength`, 0 to 4, from the next answer on."""
        return self.take(self.vote(kind="strength", round=self.next, strength=strength))

    def learn_directly(self) -> Vote:
        """Gives up the head: from here on the model learns from the clicks alone, whether or not a person is consistent."""
        return self.take(self.vote(kind="direct", round=self.next))

    def repeat(self, stored: Sequence[Vote], written: bool = False) -> None:
        """Takes stored answers again, in their order; UserError for another run's. `written`: they are in votes.jsonl."""
        for vote in stored:
            own = (self.group.digest, self.group.prompt, self.group.step)
            if vote.kind == "vote" and vote.round == self.next and (vote.digest, vote.prompt, vote.step) != own:
                raise UserError(
                    f"votes: prompt and pictures of round {vote.round + 1} are not those that were answered; "
                    "they belong to another run, another version or another machine"
                )
            self.take(vote, written)

    @property
    def wrong_prompt(self) -> str:
        """The first held-out prompt that the base draws wrong, by the rewards that define right pictures; the first one if none
        does, or if all are right."""
        base = self.trainer.evaluator.base()
        assert base is not None
        wrong = [] if base.right is None else (base.right == 0).nonzero().flatten().tolist()
        return self.trainer.heldout[wrong[0] if wrong else 0]

    def pictures(self, prompt: str) -> tuple[Tensor, Tensor]:
        """The base model's picture [3, H, W] of a prompt, and that of the weights as they are, from the same noise: that of the
        evaluations, if the prompt is held out."""
        heldout = self.trainer.heldout
        sampler = self.trainer.evaluator.sampler_now(seed=self.trainer.config.trainer.seed)
        place = heldout.index(prompt) if prompt in heldout else 0
        if prompt not in self._drawn:
            with self.trainer.policy.base():
                before = sampler.pictures([prompt], place)[0]
            self._drawn[prompt] = (before, 0, before)
        before, changes, now = self._drawn[prompt]
        if changes != self.changes:
            now = sampler.pictures([prompt], place)[0]
            self._drawn[prompt] = (before, self.changes, now)
        return before, now

    def settle(self) -> None:
        """Looks at held-out pictures, if weights changed since the last look, and takes back what made them worse."""
        if self.brake.since:
            self._look()

    def finish(self) -> dict[str, Comparison]:
        """Ends the run at this iteration: weights, comparison, pictures and card, as any run's."""
        t = self.trainer
        self.settle()
        t.set_length(max(1, t.iteration), t.config.evaluation.every)
        if not any(row["kind"] == "eval" and row["iteration"] == t.iteration for row in t.alarms.rows):
            t.evaluate()
        if (
            t.world.is_main and (base := t.evaluator.base()) is not None
        ):  # by the head as it is now; there was none when they were drawn
            base.scores["clicks"] = self.clicks.scores(base.images.float() / 255, base.prompts)
        t.save()
        return t.finish()

    # how an answer is taken

    def vote_on(self, round: int, liked: Sequence[int] = (), skipped: bool = False, seconds: float = 0.0) -> Vote:
        """An answer to the group of `round`, which lies ready."""
        vote = self.vote(kind="vote", round=round, liked=tuple(liked), skipped=skipped, seconds=seconds)
        if (group := self.groups.get(round)) is None:
            return vote
        of_group = {"prompt": str(group.prompt), "step": group.step, "digest": group.digest}
        return vote.model_copy(update={**of_group, "liked": tuple(sorted(set(vote.liked)))})

    def vote(self, **said: Any) -> Vote:
        """An answer, now; UserError if a page sent what cannot be one."""
        now = datetime.now(UTC).isoformat(timespec="seconds")
        try:
            return checked_as(Vote, {**said, "iteration": self.trainer.iteration, "ahead": self.ahead, "time": now})
        except ValueError as error:
            raise UserError(f"an answer's {error}") from None

    def take(self, vote: Vote, written: bool = False) -> Vote:
        """Stores an answer, unless it is `written`, and acts on it."""
        self.store(vote, self.next, written)
        self.act(vote)
        return vote

    def store(self, vote: Vote, asked: int, written: bool = False) -> None:
        """Checks an answer while the group of round `asked` is asked, and writes it unless it is `written`: before it is acted
        on, so that a kill in between loses nothing."""
        if vote.kind == "vote":
            if vote.round != asked:
                raise UserError(f"round {vote.round + 1} is not the one that is asked, which is {asked + 1}; reload the page")
            images = self.groups[asked].images
            size = len(images)
            votes.check_liked(vote.liked, size)
        elif vote.kind == "undo" and not self._before:
            raise UserError("there is no answer that could be taken back")
        if self.trainer.files.writes and not written:
            run = self.trainer.files.run
            with self.trainer.files.holding():
                if vote.kind == "vote":
                    save_pictures(run.group(vote.round), images, range(size), seconds_of(self.trainer.policy, len(images[0])))
                votes.append(run.votes, vote)

    def act(self, vote: Vote) -> None:
        """Does what a stored answer asks for, and samples the groups that lie ready after it."""
        if vote.kind == "undo":
            self._undo()
        elif vote.kind == "strength":
            self.strength = vote.strength
        elif vote.kind == "direct":
            self.direct = True
        else:
            self._learn(vote)
        self._fill()

    def _fill(self) -> None:
        """Samples groups until `ahead` lie ready."""
        for round in range(self.next, self.next + self.ahead):
            if round not in self.groups:
                self.groups[round] = self._sample(round)
        self.groups = {round: group for round, group in self.groups.items() if round >= self.next}

    def _sample(self, round: int) -> Group:
        """The group of the candidate whose pictures differ most, by the first `PREVIEWED` of each."""
        t = self.trainer
        candidates = list(dict.fromkeys(self.order.batch(round, CANDIDATES)))
        step = SHOWN_STEPS[round % len(SHOWN_STEPS)]
        shown = replace(t.algorithm, branch_steps=(step,), granularities=(1,), branch_schedule="all")  # type: ignore[type-var]
        plans, kernel = shown.plans(t.config.sampling.num_steps), shown.kernel(t.sigmas)
        with torch.no_grad(), in_training(t.policy, t.config.sampling.guidance_scale):
            cond = t.policy.encode(candidates)

            def drawn(size: int, rows: Sequence[int]) -> list[tuple[Rollout, Tensor]]:
                spec = RolloutSpec(plans, size, kernel, partial(self._noise, round), 0, {})
                rollouts, _ = t.sizes.fit(partial(t.collector.roll_out, spec, cond, rows))
                return [(one, t.sizes.fit(partial(self._decoded, one))) for one in rollouts]

            previews = drawn(min(PREVIEWED, shown.group_size), range(len(candidates)))
            spreads = [float(images.var(0).mean()) for _, images in previews]
            chosen = self._of_main(lambda: spreads.index(max(spreads)))
            ((rollout, images),) = drawn(shown.group_size, [chosen])
        images = t.world.gather(images if t.world.is_main else images[:0])  # rank 0's, which are shown
        digest = votes.digest_of(candidates[chosen], to_uint8(stills(images)))
        return Group(round, candidates[chosen], step, images, rollout, digest, self.changes)

    def _decoded(self, rollout: Rollout) -> Tensor:
        return decode(self.trainer.policy, rollout.finals[0], self.trainer.sizes.decode)

    def _noise(self, round: int, place: int, *purpose: Any) -> torch.Generator:
        """The generator of one draw for the group of a round."""
        return generator_for(self.trainer.config.trainer.seed, "teach", round, place, *purpose)

    def _learn(self, vote: Vote) -> None:
        group = self.groups[self.next]
        self._before.append((self.next, self._memory()))
        del self._before[:-8]
        self.next += 1
        if vote.skipped or not vote.liked:
            return
        self._choices[group.round] = Choice(
            features_of(group.images, [group.prompt] * len(group.images), self.clicks.encoder), vote.liked
        )
        self.head = self.clicks.head = fit(list(self._choices.values()))
        if len(self._choices) < FIRST or self.head is None:
            return
        agreement, trust = self.head.agreement, self.head.trust
        if not self.direct and len(self._choices) == ENOUGH and agreement.mean < HOPELESS:
            self.notify(
                f"after {ENOUGH} groups the head orders {agreement.mean:.0%} of pairs that it was not fitted to as you do, "
                'little more than chance; "Clicks alone" goes on without it, which takes many more clicks'
            )
        if self.direct:
            self._waiting = [
                (g, v) for g, v in [*self._waiting, (group, vote)] if g.changes == self.changes
            ]  # earlier weights'
            if len(self._waiting) == DIRECT:
                self._update_directly()
        elif self._of_main(lambda: trust > 0 and not self.reached):
            self.iterate()

    def iterate(self) -> None:
        """`UPDATES` iterations on the rewards as they are."""
        self._set_rate()
        for _ in range(UPDATES):
            self.trainer.iterate()
        self._changed()

    def _changed(self) -> None:
        """Counts a change of the weights, and looks at held-out pictures after every `LOOK` of them."""
        self.changes += 1
        self.brake.since += 1
        if self.brake.since == LOOK:
            self._look()

    def _update_directly(self) -> None:
        """One update on the groups that were shown, whose advantages are their clicks, normalised within each group."""
        t, examples, conds = self.trainer, list[Example](), list[Cond]()
        self._set_rate()
        for place, (group, vote) in enumerate(self._waiting):
            liked = torch.zeros(len(group.images))
            liked[list(vote.liked)] = 1
            advantages = ((liked - liked.mean()) / liked.std()).clamp(-t.algorithm.advantage_clip, t.algorithm.advantage_clip)
            draw = partial(self._noise, group.round, 0, "examples", group.step)
            for example in t.algorithm.examples(group.rollout, advantages, draw):
                examples.append(replace(example, prompt=place))
            conds.append(t.policy.encode([group.prompt]))
        t.learner.set_rate(t.iteration, t.config.trainer.iterations)
        with in_training(t.policy, t.config.sampling.guidance_scale):
            t.updater.update(examples, Cond.join(conds))
        self._waiting = []
        self._changed()

    def _set_rate(self) -> None:
        self.trainer.set_rate(self.rate * self.brake.step * (self.strength if self.direct else 1))

    def _look(self) -> None:
        t = self.trainer
        row, final, base = t.evaluate(), t.final, t.evaluator.base()
        assert base is not None and final is not None
        heldout, nearer = None, True
        if t.world.is_main:  # which has all pictures
            sides = [features_of(one.images.float() / 255, one.prompts, self.clicks.encoder) for one in (base, final)]
            heldout = sides[0], sides[1]
            last = (self._heldout or (sides[0], sides[0]))[1]
            nearer = self.direct or self.head is None or bool(self.head(sides[1]).mean() > self.head(last).mean())
        look = self.brake.look(t, row, self.next, nearer)
        if look.wrong:
            self.changes += 1
            self.notify(f"held-out pictures: {look.wrong}; back to the last good weights, with smaller steps")
        elif look.good:
            self._heldout = heldout

    # several ranks: rank 0 has the page, and the others do what it does

    def lead(self, vote: Vote | None = None, ended: bool = False) -> None:
        """Sends the other ranks an answer to act on, a sign of life, or the end."""
        self.trainer.world.broadcast_text(json.dumps({"vote": vote and vote.model_dump(), "ended": ended}))

    def follow(self, prompt: str) -> None:
        """Acts on the answers that rank 0 sends, until it has ended; on the other ranks."""
        self.pictures(prompt)
        while not (sent := json.loads(self.trainer.world.broadcast_text("")))["ended"]:
            if sent["vote"] is not None:
                self.act(Vote.model_validate(sent["vote"], strict=False))
                self.pictures(prompt)

    def _of_main(self, decide: Callable[[], Any]) -> Any:
        """What rank 0 finds, on all ranks."""
        world = self.trainer.world
        return json.loads(world.broadcast_text(json.dumps(decide() if world.is_main else None)))

    # how an answer is taken back

    def _memory(self) -> Any:
        own = (self.head, self.direct, dict(self._choices), list(self._waiting), replace(self.brake), self._heldout)
        return weights_of(self.trainer), own, dict(self.groups)

    def _undo(self) -> None:
        self.next, (weights, own, groups) = self._before.pop()
        put_back(self.trainer, weights)
        self.head, self.direct, self._choices, self._waiting, self.brake, self._heldout = own
        self.clicks.head, self.groups = self.head, groups
        self.changes += 1
