"""The parts of the package that tests take apart or change: where each is. If it moves, a line here follows it."""

from importlib import import_module
from pkgutil import resolve_name
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
        "Block Column Failed HEADER Indexed Job MAX_FRAME_BYTES Overflow Permute Permuted ReadLimits ReaderSpec "
        "Ready RowError Scan StoreSpec TokenizeSpec Tokenized decode_job decode_reply"
    ),
    "core.plain_values": "from_builtins to_builtins",
    "core.settings": "Settings naming_settings prepared resolve_path tag_of",
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


_PLACES: dict[str, tuple[str, ...]] = {
    name: (places,) if isinstance(places, str) else places
    for name, places in {
        # Sizes and numbers
        "bytes_of_a_group_in_a_file": "integrations.slime.checkpoint.FILE_BYTES",
        "bytes_of_an_index_block": "loader.opened_rows._INDEX_BLOCK_BYTES",
        "most_bytes_held_of_parquet": "sources.arrow.parquet_reader._HELD_BYTES",
        "most_bytes_of_a_snapshot": "checkpoint.snapshot.MAX_FILE_BYTES",
        "most_files_of_lines": "core.identity._MAX_FILES",
        "most_growth_of_an_encoder": "tokenization.encoders.fast_backends.MAX_GROWTH_BYTES",
        "most_heads": "sources.remote.listing._MAX_HEADS",
        "most_moments": "telemetry.call_times._MAX_MOMENTS",
        "most_open_files": "sources.files._MAX_OPEN_FILES",
        "most_operations": "tokenization.chat_template.symbolic_values._MAX_OPERATIONS",
        "most_pieces_of_a_plan": "batching.planned._MAX_PIECES",
        "most_places_of_a_hub": "sources.remote.hub_store._MAX_PLACES",
        "most_quiet_proofs": "loader.proving._MOST_QUIET",
        "most_rows_of_a_stream_window": "read_ahead.stream_windows.MAX_WINDOW_ROWS",
        "most_scans_of_an_array": "sources.json_array._MAX_SCANS",
        "piece_bytes_of_an_array": "sources.json_array._PIECE_BYTES",
        "ranks_at_start": "read_ahead.windows._RANKS_AT_START",
        "step_bytes_of_lines": "core.identity._STEP_BYTES",
        # Times
        "again_to_ray_s": "workers.ray.executor._AGAIN_S",
        "beat_s": "workers.request_handler._BEAT_S",
        "close_of_telemetry_s": "telemetry.recorder._CLOSE_TIMEOUT_S",
        "end_of_calls_s": "read_ahead.ranks._END_TIMEOUT_S",
        "end_of_threads_s": "core.threads._EXIT_TIMEOUT_S",
        "first_wait_s": ("sources.remote.reads._FIRST_WAIT_S", "sources.remote.reads._FIRST_WAIT_WHEN_ASKED_S"),
        "hub_timeout_s": "sources.remote.hub_store._TIMEOUT_S",
        "look_at_a_proof_s": "loader.background_proof._LOOK_S",
        "look_at_workers_s": "workers.process_pool._LOOK_EVERY_S",
        "patience_with_a_display_s": "loader.wait_progress._PATIENCE_S",
        "patience_with_a_fork_server_s": "workers.process_pool._PATIENCE_S",
        "patience_with_an_early_start_s": "workers.popen._PATIENCE_S",
        "patience_with_ranks_s": "read_ahead.ranks._PATIENCE_S",
        "patience_with_starts_s": "workers.worker._PATIENCE_S",
        "shortage_s": "workers.worker._SHORTAGE_S",
        "work_before_an_audit_s": "tokenization.encoders.text_encoder.WORK_BEFORE_AUDIT_S",
        # Functions and classes
        "arrow_writer": "sources.arrow.huggingface.write_arrow",
        "clock_of_waits": ("delivery.coordinator.time", "read_ahead.mixture.time"),
        "cpus_of_a_loader": "loader.opening.num_usable_cpus",
        "demo_delivers": "cli.run._delivered",
        "demo_kills_at": "cli.run._KILL_AT",
        "demo_runs_s": "cli.run._RUN_S",
        "demo_words": "cli.run._run_words",
        "end_of_a_fork": "workers.processes.Forked.ended",
        "execute": "workers.popen.execute",
        "file_digest": "sources.base.file_digest",
        "free_memory_of_a_loader": "loader.opening.available_memory",
        "first_user_of_obstore": "sources.remote.obstore_store._first_user",
        "index_blocks": "workers.request_handler.index_blocks",
        "index_reply": "read_ahead.indexer.Indexer._take",
        "known_points": "cli.machine.known_points",
        "library_of_the_demo": "demo._library",
        "load_a_backend": "tokenization.encoders.fast_backends.load_backend",
        "load_a_tokenizer": "tokenization.tokenizer_files.TokenizerFiles.load",
        "look_at_growth_every": "tokenization.encoders.fast_backends.LOOK_EVERY",
        "look_at_redirects": "sources.remote.obstore_store.Redirects.look",
        "memory_for_a_file": "core.checksummed_file._memory",
        "memory_of_a_worker": "loader.autotune.process_memory",
        "mix_of_a_watch": "telemetry.chunk_watch.mix",
        "object_of_many": "core.identity.ObjectRefs._made",
        "permute": "workers.request_handler.permute",
        "pieces_of_a_group": "integrations.slime.checkpoint.pieces",
        "private_bytes": "tokenization.encoders.fast_backends.private_bytes",
        "part_is_asked": "workers.changes.Changes.offer",
        "read_a_row_of_an_array": "sources.json_array.read_row",
        "remembered_lines": "core.identity._counts",
        "reply_of_a_shared_index": "read_ahead.indexer.SharedIndexer._checked",
        "rows_per_window": ("order.order.ROWS_PER_WINDOW", "read_ahead.indexed_windows.ROWS_PER_WINDOW"),
        "single_object": "sources.remote.listing._single",
        "spawn_a_proof": "loader.background_proof._spawn",
        "submit": "workers.inline.InlineExecutor.submit",
        "starts_of_a_copier": "integrations.torch.loader.started",
        "tokenize_function_of_slime": "integrations.slime.config._tokenize_fn",
        "torch_is_there": "integrations.slime.torch_data.is_available",
        "tuner": "loader.autotune.Tuner",
        "version_of_a_proven_backend": "cli.machine.version_of",
        "version_of_a_backend": "loader.background_proof.version_of",
    }.items()
}


def change(monkeypatch: Any, **values: Any) -> None:
    """Put ``values`` in the place of what has these names, for as long as ``monkeypatch`` says."""
    for name, value in values.items():
        for place in _PLACES[name]:
            monkeypatch.setattr(f"asyncdata.{place}", value)


def real(name: str) -> Any:
    """What has this name now."""
    return resolve_name(f"asyncdata.{_PLACES[name][0]}")
