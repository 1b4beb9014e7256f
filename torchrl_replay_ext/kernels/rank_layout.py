"""The arrays of transitions in buckets of nearly equal priorities.

* ``bucket`` and ``place`` of each slot: its bucket, and its place among the members of this bucket. Within a bucket,
  ranks ascend with places. Member k has place k, but -1 - k in bucket ``NEW``.
* ``members``: blocks of slots, one per bucket. ``start`` and ``room`` are the begin and the size of the block of each
  bucket; ``top`` is the first unused position after all blocks. A block that is full moves to the top with twice the
  space. When no space is left, all blocks are laid out anew, which happens once in O(N) changes.
* ``counts``: entry ``BUCKETS + b`` is the number of members of bucket b. Entry i > 0 counts for entry ``i >> 4`` too,
  so that entry 0 is the number of all transitions.
"""

BUCKETS = 1 << 15
# the bucket of slots without a transition, and that of transitions that were never updated
NOWHERE, NEW = -1, 0
BITS = 4
# a priority keeps 7 bits of its mantissa
DROPPED_BITS = 16
# the first entry of ``counts`` below entry 0
FIRST = BUCKETS >> 3 * BITS
