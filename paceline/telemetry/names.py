"""Every service, span and attribute name, once.

GenAI attributes follow the OpenTelemetry conventions where one exists. No convention covers speculative decoding, so
those live under ``paceline.*``, with vLLM's per-request names behind the prefix.
"""

from typing import Final

# --- services (resource attribute service.name) -------------------------------------------------------------------

SERVICE_ROUTER: Final = "paceline-router"
SERVICE_VERIFY: Final = "paceline-verify"
SERVICE_DRAFT: Final = "paceline-draft"
SERVICE_LEDGER: Final = "paceline-ledger"

# --- spans ----------------------------------------------------------------------------------------------------------

SPAN_GENERATE: Final = "Generate"  # router: the whole request
SPAN_PLAN: Final = "plan"  # router: template, tokens, task type, decision
SPAN_DECODE: Final = "decode"  # verify: one Decode call, child of Generate
SPAN_QUEUE: Final = "queue"  # verify: arrival to first forward
SPAN_PREFILL: Final = "prefill"  # verify: first forward to first token
SPAN_ROUND: Final = "round"  # verify: one commit to the next; id from round_context
SPAN_VERIFY: Final = "verify"  # verify: forward and accept of a round
SPAN_DRAFT: Final = "draft"  # draft: the drafter's work for a round, child of the verify tier's round span

# --- attributes by OpenTelemetry's conventions -----------------------------------------------------------------------

GEN_AI_OPERATION_NAME: Final = "gen_ai.operation.name"  # "chat" or "text_completion"
GEN_AI_PROVIDER_NAME: Final = "gen_ai.provider.name"  # PROVIDER
GEN_AI_REQUEST_MODEL: Final = "gen_ai.request.model"
GEN_AI_REQUEST_MAX_TOKENS: Final = "gen_ai.request.max_tokens"
GEN_AI_REQUEST_TEMPERATURE: Final = "gen_ai.request.temperature"
GEN_AI_REQUEST_TOP_K: Final = "gen_ai.request.top_k"
GEN_AI_REQUEST_TOP_P: Final = "gen_ai.request.top_p"
GEN_AI_REQUEST_SEED: Final = "gen_ai.request.seed"
GEN_AI_REQUEST_PRESENCE_PENALTY: Final = "gen_ai.request.presence_penalty"
GEN_AI_REQUEST_FREQUENCY_PENALTY: Final = "gen_ai.request.frequency_penalty"
GEN_AI_RESPONSE_ID: Final = "gen_ai.response.id"
GEN_AI_RESPONSE_MODEL: Final = "gen_ai.response.model"
GEN_AI_RESPONSE_FINISH_REASONS: Final = "gen_ai.response.finish_reasons"  # sequence of str
GEN_AI_RESPONSE_TIME_TO_FIRST_CHUNK: Final = "gen_ai.response.time_to_first_chunk"  # seconds
GEN_AI_USAGE_INPUT_TOKENS: Final = "gen_ai.usage.input_tokens"
GEN_AI_USAGE_OUTPUT_TOKENS: Final = "gen_ai.usage.output_tokens"
ERROR_TYPE: Final = "error.type"  # name of the error class or status code

PROVIDER: Final = "paceline"

# --- our own attributes ----------------------------------------------------------------------------------------------

REQUEST_ID: Final = "paceline.request.id"
TASK_TYPE: Final = "paceline.task_type"
PLAN_MODE: Final = "paceline.plan.mode"  # plain or speculative
PLAN_DRAFTER: Final = "paceline.plan.drafter"
PLAN_K_MAX: Final = "paceline.plan.k_max"
PLAN_LAW: Final = "paceline.plan.law"
PLAN_REASON: Final = "paceline.plan.reason"
PLAN_ARM: Final = "paceline.plan.arm"  # auto, holdout, off, probe, ineligible, asked, pinned
PLAN_CONSIDERED: Final = "paceline.plan.considered"  # sequence of str: what was looked at, in words
TASK_ORIGIN: Final = "paceline.task_origin"
TASK_CONFIDENCE: Final = "paceline.task_confidence"
NUMERICS: Final = "paceline.numerics"
RESUMED: Final = "paceline.resumed"  # times the request moved to another verify replica
CANCELLED: Final = "paceline.cancelled"  # the caller ended the call before its end
SEQUENCE_ID: Final = "paceline.sequence.id"
EPOCH: Final = "paceline.sequence.epoch"

ROUND_INDEX: Final = "paceline.round.index"
ROUND_BASE_LEN: Final = "paceline.round.base_len"
ROUND_DRAFTED: Final = "paceline.round.drafted"
ROUND_ACCEPTED: Final = "paceline.round.accepted"
ROUND_IGNORED: Final = "paceline.round.ignored"
ROUND_COMMITTED: Final = "paceline.round.committed"
ROUND_OUTCOME: Final = "paceline.round.outcome"
ROUND_DRAFTER: Final = "paceline.round.drafter"
ROUND_BESIDE: Final = "paceline.round.beside"  # looked up in the verify tier
ROUND_LAW: Final = "paceline.round.law"  # how the draft was judged
ROUND_ASKED: Final = "paceline.round.k"  # guesses asked for
ROUND_DEPTH_REASON: Final = "paceline.round.depth_reason"  # why so many
ROUND_AHEAD_LEVEL: Final = "paceline.round.level"  # how far the drafter was to look ahead of the verdict
ROUND_AHEAD_HIT: Final = "paceline.round.ahead_hit"  # the block was there for the actual outcome
ROUND_HIDDEN_DRAFT_S: Final = "paceline.round.hidden_draft_s"  # spent ahead, behind an earlier round
ROUND_MARKS: Final = "paceline.round.marks"  # sequence of str: empty, late, unavailable, cut, slow
ROUND_DRAFT_S: Final = "paceline.round.draft_s"
ROUND_NETWORK_S: Final = "paceline.round.network_s"
ROUND_WAIT_S: Final = "paceline.round.wait_s"
ROUND_VERIFY_S: Final = "paceline.round.verify_s"
ROUND_FORWARD_S: Final = "paceline.round.forward_s"
ROUND_ACCEPT_S: Final = "paceline.round.accept_s"
BATCH_SEQUENCES: Final = "paceline.batch.sequences"
BATCH_ROWS: Final = "paceline.batch.rows"
DRAFT_QUEUE_S: Final = "paceline.draft.queue_s"
DRAFT_AHEAD: Final = "paceline.draft.ahead"  # pushed before the verdict, so it lies before its round
DRAFT_TOKENS: Final = "paceline.draft.tokens"  # tokens the drafter proposed

QUEUE_S: Final = "paceline.queue_s"
PREFILL_S: Final = "paceline.prefill_s"
DECODE_S: Final = "paceline.decode_s"
DRAFT_S: Final = "paceline.draft_s"
NETWORK_S: Final = "paceline.network_s"
WAIT_S: Final = "paceline.wait_s"
VERIFY_S: Final = "paceline.verify_s"
OVERHEAD_S: Final = "paceline.overhead_s"

NUM_ROUNDS: Final = "paceline.num_rounds"
NUM_SPEC_STEPS: Final = "paceline.num_spec_steps"
NUM_DRAFT_TOKENS: Final = "paceline.num_draft_tokens"
NUM_ACCEPTED_DRAFT_TOKENS: Final = "paceline.num_accepted_draft_tokens"
NUM_IGNORED_DRAFT_TOKENS: Final = "paceline.num_ignored_draft_tokens"
NUM_LATE_ROUNDS: Final = "paceline.num_late_rounds"
NUM_UNAVAILABLE_ROUNDS: Final = "paceline.num_unavailable_rounds"
NUM_EMPTY_ROUNDS: Final = "paceline.num_empty_rounds"
ACCEPTANCE_HISTOGRAM: Final = "paceline.acceptance_histogram"  # sequence of int
MEAN_ACCEPTANCE_LENGTH: Final = "paceline.mean_acceptance_length"
DRAFT_ACCEPTANCE_RATE: Final = "paceline.draft_acceptance_rate"
NUM_SLOW_ROUNDS: Final = "paceline.num_slow_rounds"
NUM_ROUND_SPANS_ELIDED: Final = "paceline.num_round_spans_elided"  # rounds beyond MAX_ROUND_SPANS
