-- Delete what something else has written where it would stop the counting of all namespaces: keys of another
-- type, a cursor of the journal that is none, and the accounts of these namespaces. Arguments: prefix of the
-- budgets; namespaces whose accounts cannot be read. Returns what was deleted. The accounts are restored from
-- the status of their budgets, and the journal is compared with all live leases.
local BUDGETS, names, deleted = ARGS[1], ARGS[2], {}
local MOST_CHECKED = 500
local KINDS = {tenures = 'hash', charged = 'hash', ended = 'hash', windows = 'hash', starts = 'zset', entries = 'stream'}
local OF_ALL = {'revisions', 'states', 'budgets', 'open', 'journal'}

local function check_type(key, expected)
  local found = call('TYPE', BUDGETS .. key).ok
  if found == 'none' or found == expected then return end
  call('DEL', BUDGETS .. key)
  deleted[#deleted + 1] = key
end

for _, key in ipairs(OF_ALL) do check_type(key, 'hash') end
local known = call('HKEYS', BUDGETS .. 'revisions')
for i = 1, math.min(#known, MOST_CHECKED) do
  for kind, expected in pairs(KINDS) do check_type(kind .. ':' .. known[i], expected) end
end
local cursor = call('HGET', BUDGETS .. 'journal', 'cursor')
if cursor and not (string.match(cursor, '^%d+%-%d+$') and #cursor <= 33) then deleted[#deleted + 1] = 'journal' end
for _, name in ipairs(names) do
  for kind in pairs(KINDS) do
    if kind ~= 'entries' then call('DEL', BUDGETS .. kind .. ':' .. name) end
  end
  for i = 1, 4 do call('HDEL', BUDGETS .. OF_ALL[i], name) end
  deleted[#deleted + 1] = 'account of ' .. name
end
if #deleted > 0 then call('HDEL', BUDGETS .. 'journal', 'generation', 'cursor') end
return encode(deleted)
