"""Rows in Arrow's formats: Parquet files and datasets of Hugging Face."""
