"""Batches: files of requests, answered line by line through the queue at the lane for such work.

May be imported by the gateway, the tasks and the command line; imports the SDK, `inferq.protocol`,
the gateway's pure parts (bodies to jobs, events to answers), fsspec and orjson.

- `records`   what is known of a file and of a batch
- `store`     the records in Redis, each change atomic (`lua/`); `upkeep` many of them at once
- `storage`   the files' bytes: a folder, or S3
- `line_reader`  bytes to lines of bounded length
- `lines`     a line to a checked request; `surveys` the first pass over a whole file
- `answering` a checked request to its answer; `outcomes` how lines end
- `windows`   what is in flight, and how far a batch has come; `journals` where that is kept
- `parts`     lines that ended, kept in parts, which are joined in the end
- `running`   a batch's lines from first to last; `turns` batches as the tasks run them
- `local`     a batch from file to file, without a gateway: `local_state` how far it is,
  `local_output` the files that it makes
- `models`    which queue serves a batch's model
- `expiry`    what is removed when its time is over
"""
