"""What every long-running process shares: its settings and its log lines.

May be imported by the worker (not by its engine and model), the gateway, the tasks and the command
line; imports the standard library, pydantic, structlog, prometheus_client, OpenTelemetry where
traces are made, and of `inferq.protocol` the errors, the names of keys, the forms of server URLs
and of trace contexts only.

- `settings`  a settings model, read from flags and environment with errors that name both
- `variables`  the names of all variables, for every part; needs the standard library only
- `problems`  what is wrong with a setting, in words
- `shared_settings`  the settings that mean the same to several processes
- `flags`     a parser's flags, made of such a model
- `command_parser`  a parser that names the flag that was meant
- `health`    the port that answers probes, and who asks for metrics
- `metrics`   a process's books as Prometheus reads them; `histogram`, which needs nothing
- `figures`   what is read from a server for them
- `tracing`   whether a process makes traces; `spans`, which needs OpenTelemetry, makes them
- `banner`    the first line of a process: the settings that were chosen
- `logs`      structlog over the standard library
"""
