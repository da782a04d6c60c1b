"""What a request asks for, and how it is carried out: targets, queries, lists, patches, writes."""
