"""Find the fastest schedule under a memory cap for given costs. Needs numpy, which is loaded when a search starts."""

from megatron_pipemem.search.result import Candidate, SearchResult
from megatron_pipemem.search.search import MAX_CHUNKS, search_schedule

__all__ = ["MAX_CHUNKS", "Candidate", "SearchResult", "search_schedule"]
