"""Parts that the MLA and GQA families share."""
