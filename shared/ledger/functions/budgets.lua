-- Accounts of budgets. Arguments: an action and its arguments. `entries` begins after an entry ('': with the first);
-- `load` wants rows of {namespace, start of the earliest window besides the last} and returns rows as stored; `write`
-- writes commands unless a guard {key of a hash, field, value as read} has changed.
-- `discard` deletes accounts that cannot be read, keys of another type, and a cursor of the journal that is none,
-- which would stop the counting of all namespaces; it returns what was deleted. Accounts are restored from the status
-- of their budgets, and the journal is compared with all live leases.
local server = require('server')
local values = require('values')
local call, encode = redis.call, cmsgpack.pack
local BUDGETS
server.on_begin(function() BUDGETS = server.beside .. '-budget:' end)
local MAX_DELETED, MOST_CHECKED = 100, 500
local KINDS = {
  tenures = 'hash', charged = 'hash', ended = 'hash', windows = 'hash', starts = 'zset', entries = 'stream',
}
local OF_ALL = {'revisions', 'states', 'budgets', 'open', 'journal', 'cost', 'costs'}
local actions = {}

function actions.revisions() return call('HGETALL', BUDGETS .. 'revisions') end
function actions.now() return string.format('%.0f', server.now_in_ms()) end

function actions.charged(keys)
  local found = call('MGET', unpack(keys))
  for i, at in ipairs(found) do found[i] = at or '' end
  return found
end

function actions.windows(namespace) return call('HVALS', BUDGETS .. 'windows:' .. namespace) end

function actions.lock(name, ttl_ms)
  return call('SET', BUDGETS .. 'lock:' .. name, 1, 'NX', 'PX', ttl_ms) ~= false
end

function actions.entries(namespace, after, most)
  local rows, from = {}, after == '' and '-' or '(' .. after
  for i, entry in ipairs(call('XRANGE', BUDGETS .. 'entries:' .. namespace, from, '+', 'COUNT', most)) do
    rows[i] = {entry[1], entry[2][2]}
  end
  return rows
end

function actions.load(wanted)
  local rows = {}
  for i, row in ipairs(wanted) do
    local name, windows = row[1], {}
    local ids = call('ZRANGEBYSCORE', BUDGETS .. 'starts:' .. name, row[2], '+inf')
    values.append(ids, call('HGET', BUDGETS .. 'open', name) or nil)
    for w, id in ipairs(ids) do windows[w] = call('HGET', BUDGETS .. 'windows:' .. name, id) end
    rows[i] = {name, call('HGET', BUDGETS .. 'revisions', name) or '',
      call('HGETALL', BUDGETS .. 'tenures:' .. name), call('HGETALL', BUDGETS .. 'charged:' .. name),
      call('HGETALL', BUDGETS .. 'ended:' .. name), call('HGET', BUDGETS .. 'states', name) or '', windows,
      call('HGET', BUDGETS .. 'budgets', name) or ''}
  end
  return rows
end

function actions.write(guards, commands, old_windows)
  for _, guard in ipairs(guards) do
    if (call('HGET', guard[1], guard[2]) or '') ~= guard[3] then return false end
  end
  for _, command in ipairs(commands) do call(unpack(command)) end
  local starts, windows, open, before = unpack(old_windows)
  for _, id in ipairs(starts and call('ZRANGEBYSCORE', starts, '-inf', '(' .. before, 'LIMIT', 0, MAX_DELETED) or {}) do
    if id ~= open then
      call('HDEL', windows, id)
      call('ZREM', starts, id)
    end
  end
  return true
end

function actions.costs(hours)
  return {call('HMGET', BUDGETS .. 'cost', 'at', 'sizes'),
    #hours > 0 and call('HMGET', BUDGETS .. 'costs', unpack(hours)) or {}, call('HGET', BUDGETS .. 'journal', 'cursor')}
end

function actions.cost_hours() return call('HKEYS', BUDGETS .. 'costs') end

function actions.discard(names)
  local deleted = {}
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
  local function is_damaged(cursor) return cursor and not (string.match(cursor, '^%d+%-%d+$') and #cursor <= 33) end

  if is_damaged(call('HGET', BUDGETS .. 'journal', 'cursor')) then values.append(deleted, 'journal') end
  local at, cursor = unpack(call('HMGET', BUDGETS .. 'cost', 'at', 'cursor'))
  if is_damaged(cursor) or at and not (string.match(at, '^%d+$') and #at <= 15) then
    call('DEL', BUDGETS .. 'cost')
    values.append(deleted, 'cost')
  end
  for _, name in ipairs(names) do
    for kind in pairs(KINDS) do
      if kind ~= 'entries' then call('DEL', BUDGETS .. kind .. ':' .. name) end
    end
    for i = 1, 4 do call('HDEL', BUDGETS .. OF_ALL[i], name) end
    deleted[#deleted + 1] = 'account of ' .. name
  end
  if #deleted > 0 then call('HDEL', BUDGETS .. 'journal', 'generation', 'cursor') end
  return deleted
end

return function(action, ...) return encode(actions[action](...)) end
