"""The object store: versions, history, lists, patches and deletion."""
