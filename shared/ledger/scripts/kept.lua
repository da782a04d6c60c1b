-- Answers what claims keep: rows of {node, resource, amount}.
local rows = {}
local found = claimed > 0 and call('HVALS', P .. 'claims') or {}
for _, value in ipairs(found) do
  local claim = decode(value)
  for i, kept in ipairs(claimed_node(claim) and claim[5] or {}) do
    if kept > 0 then rows[#rows + 1] = {claim[1], claim[4][2 * i - 1], kept} end
  end
end
return pack(rows)
