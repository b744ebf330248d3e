"""Jobs' events to responses, each a pure function of its jobs' notes and events."""
