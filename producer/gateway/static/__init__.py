"""The page's files, served as they are by `inferq.producer.gateway.page`; plain web standards."""
