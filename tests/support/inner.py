"""What is inside of the package and tests change, each by a name of its own: if it moves, a line here follows it."""

from pkgutil import resolve_name
from typing import Any

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
