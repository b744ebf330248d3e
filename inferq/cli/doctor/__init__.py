"""`inferq doctor`: looks at settings, server, queue, model and machine, and says what to do.

One module for each area, which gives findings; `command` asks all of them and prints. For the
command line only.
"""
