"""The parts of the package that tests take apart: where each is found. If it moves, a line here follows it."""

from importlib import import_module
from typing import Any

_NAMES = {
    "batching.torch_tensors": "to_torch",
    "batching.online": "OnlinePacks",
    "batching.packers": "SinglePacking",
    "batching.packs": "PackState",
    "batching.planned": "pack_rows PackRules PlannedOrder",
    "batching.xtuner_packing": "proxy_cost",
    "checkpoint.restore": "content_changes describe_change find_changes setting_of",
    "checkpoint.snapshot": "SCHEMA Snapshot StreamState from_state_dict to_state_dict",
    "checkpoint.summary": "describe_file",
    "cli.main": "main",
    "cli.output": "Piece TokenTexts",
    "cli.rows": "OrderView",
    "cli.run": "Delivered Progress Reading combined_digest read_record",
    "cli.shown_text": "MaskedText Turn Turns lines_of plain_text",
    "core.checksummed_file": "unpack_file",
    "core.columns": "Columns bfloat16_bits declared",
    "core.errors": (
        "ShortageError by_reason get_logger is_shortage observe_events owning_events raise_if_shortage "
        "redacted safe_cause short_of shortened stop_observing user_traceback"
    ),
    "core.files": "TemporaryFolder cache_folder check_ours remove_left_over replace_file",
    "core.identity": "Address FileRef HTTP ObjectRefs ObjectsOfStore Pin canonical line_number line_number_within",
    "core.messages": (
        "Block Column Failed HEADER Indexed Job MAX_FRAME_BYTES Overflow Permute Permuted ReadLimits "
        "ReaderSpec Ready RowError Scan StoreSpec TokenizeSpec Tokenized decode_job "
        "decode_reply"
    ),
    "core.plain_values": "from_builtins to_builtins",
    "core.settings": "Settings resolve_path tag_of",
    "core.threads": "call_soon_in_this_loop no_op",
    "core.types": "SampleRange measured",
    "delivery.bad_rows": "_REASONS bad_row_error MassDrops without_text",
    "delivery.channel": "Channel",
    "delivery.chunk": "Chunk row_ids",
    "delivery.coordinator": "Coordinator",
    "delivery.ledger": "Counters DeliveryRules RestartPoint Returned",
    "delivery.outcome_memory": "OutcomeMemory RowReport RowTable",
    "delivery.outcome_policy": "policy_of",
    "delivery.quarantine": "Quarantine read_quarantine",
    "integrations.slime.async_rollouts": "TrackingBuffer",
    "integrations.slime.config": "Options PREFIX settings_of",
    "integrations.slime.rollout_ledger": "Moment Numbering",
    "integrations.slime.rows": "SlimeTokenizeFn",
    "integrations.slime.samples": "from_record groups_of import_by_path resolve_sample_type to_record",
    "loader.background_proof": "Prover SWITCH",
    "loader.config": "STRUCTS",
    "loader.opening": "TuningLimits check_cluster limits_of",
    "loader.measurements": "measurements",
    "loader.mix": "mix_of_file part_seed",
    "loader.opened_rows": "index_identity shared_scans",
    "loader.statistics": "explain_timeout",
    "loader.wait_progress": "WaitProgress",
    "loader.waits": "progress_of way_of",
    "read_ahead.index_file": "IndexFile hold_rows make_room rows_of",
    "read_ahead.row_index": "RowIndex",
    "read_ahead.source": "ChunkPacer",
    "report.figures": "Series steps_of",
    "report.page": "MAX_SAMPLES MAX_SAMPLE_CHARS Samples ShownSample ShownText script_json",
    "report.run_page": "MAX_ROWS",
    "sources.arrow.parquet": "ParquetBlocks",
    "sources.arrow.rows_to_json": "RowWriter block_rows is_same_form",
    "sources.base": "FileBlocks Files",
    "sources.files": "FileChangedError MAX_LISTED_FILES WHOLE_BYTES data_fingerprint file_digest is_same",
    "sources.json_array": "ArrayReader",
    "sources.line_scanner": "LineReader PythonLineReader read_block read_row",
    "sources.paths": "GivenAddress is_address without_secrets",
    "sources.remote.block_cache": "BlockCache",
    "sources.remote.hub_store": "HubStore wait_asked_s",
    "sources.remote.listing": "find_objects",
    "sources.remote.obstore_store": "ObstoreStore Redirects",
    "sources.remote.reads": "Reads coalesced write_stored",
    "sources.remote.store": "FsspecStore ObjectStamp StoreError store_spec",
    "sources.row_json": "encode_row",
    "sources.spool": "part_path write_part",
    "sources.stream": "MAX_ROW_BYTES StreamOrder plain_state",
    "sources.text_stream": "ArrayBlocks split_array split_lines",
    "telemetry.call_times": "CallTimes CpuShare CpuWatch Histogram",
    "telemetry.chunk_watch": "ChunkWatch keys_of",
    "telemetry.recorder": "RecordFile",
    "telemetry.records": "BadRowRecord EDGES Event Interval MAX_OF_REASON Place SourceCounts TokenizerName",
    "tokenization.base": "BatchTokenizer fingerprints_of",
    "tokenization.chat_template.assistant_spans": "ChatSpans",
    "tokenization.chat_template.jinja_environment": "make_environment",
    "tokenization.chat_template.programs": "ADD NOTHING_PROVEN Program Shapes Step",
    "tokenization.chat_template.template": "ChatTemplate choose_templates",
    "tokenization.column_writer": "ColumnWriter Offsets Span encode_spans token_spans trained_tokens",
    "tokenization.encoders.equivalence_records": (
        "CharacterFinder Proof ProvenTexts Subject answered ask_for asked_for num_points points_of subject_of"
    ),
    "tokenization.encoders.equivalence_sweep": "GrowingProof OffsetCheck Sweep is_known ranges_of",
    "tokenization.encoders.fast_backends": "BoundedEncoder FAST_BACKENDS FlatIds load_backend version_of",
    "tokenization.encoders.hf_encoder": "HfEncoder LengthsById Located TokenLengths lengths_of separator_of",
    "tokenization.encoders.text_encoder": "open_encoder",
    "tokenization.functions.fixed_length": "place_cut",
    "tokenization.functions.prompt": "PromptRowFn",
    "tokenization.functions.tokenizer_settings": "OfTokenizer",
    "tokenization.media": "without_media",
    "tokenization.rows": (
        "MAX_NESTING MEDIA_KEYS RowDecoder RowFault WrongIdsError decode_object decode_value missing_key"
    ),
    "tokenization.tokenizer_files": "PATTERNS TokenizerFiles",
    "tokenization.user_function": "FunctionTokenizer",
    "workers.base": "Crashed NUM_SLOTS WorkerState",
    "workers.changes": "Promise",
    "workers.inline": "InlineExecutor",
    "workers.machine": "available_memory cpu_times num_usable_cpus process_memory resident_memory",
    "workers.popen": "EarlyForkServer",
    "workers.processes": "Connection",
    "workers.ray": "local_workers_of",
    "workers.ray.actor": "NodeFiles Terms check_function node_name terms_of",
    "workers.ray.executor": "ClusterExecutor",
    "workers.request_handler": "Handler",
    "workers.worker_main": "descriptors why_not_shared",
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    """What is imported from here; only its module is loaded."""
    if name not in _MODULES:
        raise AttributeError(f"{name} is no part that tests take apart")

    return getattr(import_module(f"asyncdata.{_MODULES[name]}"), name)
