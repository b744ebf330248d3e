"""The page's files, served as they are by `gateway.routes.page`; plain web standards."""
