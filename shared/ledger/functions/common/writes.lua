-- Writing everything that changed, once, at the end of a call.
local fair = require('fair')
local layouts = require('layouts')
local ledger = require('ledger')
local quota = require('quota')
local records = require('records')
local repelling = require('repelling')
local server = require('server')
local values = require('values')
local call, encode, struct_pack = redis.call, cmsgpack.pack, struct.pack
local D, N = layouts.DEVICE, layouts.NODE

local M = {}

-- Delete removed nodes without leases. Fences continue from the highest deleted one.
function M.delete_removed_nodes()
  for name in pairs(records.changed_nodes) do
    local node = records.nodes[name]
    if node and node[N.STATUS] == -1
      and call('ZCOUNT', server.prefix .. 'lease-nodes', node[N.NUMBER], node[N.NUMBER]) == 0 then
      local uuids = records.device_uuids(name)
      records.fetch('devices', uuids)
      for _, uuid in ipairs(uuids) do
        local device = records.devices[uuid]
        if device and device[D.NODE] == name and device[D.SHARES] == 0 then
          ledger.fence_floor = math.max(ledger.fence_floor, device[D.FENCE])
          records.devices[uuid] = false
          call('HDEL', server.prefix .. 'devices', uuid)
        end
      end
      records.nodes[name], records.freed_nodes[name] = false, nil
      call('DEL', server.prefix .. 'facts:' .. name)
      call('HDEL', server.prefix .. 'nodes', name)
      call('ZREM', server.prefix .. 'freed-nodes', name)
    end
  end
end

-- Each entry names the one before it: readers recognise that one of them is missing. Where entries are larger than
-- usual, the feed is shorter.
local FEED_ENTRY_BYTES = 4096
local function add_feed_entry(version, bytes, ...)
  local most = server.feed_length
  if bytes > FEED_ENTRY_BYTES then most = math.ceil(most * FEED_ENTRY_BYTES / bytes) end
  ledger.feed_entry = call('XADD', server.prefix .. 'feed', 'MAXLEN', '~', most, '*',
    'v', string.format('%.0f', version), 'p', ledger.feed_entry, ...)
end

-- Names with the packed values to be written; and all values joined, after the size of a packed array of
-- their lengths, and that array.
local function packed_records(changed, cache)
  local parts, joined, lengths, count = {}, {}, {}, 0
  for name in pairs(changed) do
    local record = cache[name]
    if record then
      local value = encode(record)
      count = count + 1
      parts[2 * count - 1], parts[2 * count] = name, value
      joined[count], lengths[count] = value, #value
    end
  end
  if count == 0 then return parts, '' end
  local packed = encode(lengths)
  return parts, struct_pack('<I4', #packed) .. packed .. table.concat(joined)
end

local function add_changes_to_feed(cause, version, node_values, device_values)
  local entry = {'e', ledger.generation, 'c', ledger.capacity, 'w', cause, 'n', node_values, 'd', device_values}
  for name, is_there in pairs(records.changed_inventories) do
    if is_there then
      local stored = call('HMGET', server.prefix .. 'facts:' .. name, 'facts', 'devices', 'served')
      values.append(entry, 'f' .. name, stored[1] or '', 'g' .. name, stored[2] or '[]', 's' .. name,
        records.served_of(name, stored[3]))
      if ledger.repels_version then values.append(entry, 'r' .. name, repelling.terms_on(name)) end
    else
      values.append(entry, 'x' .. name, '')
    end
  end
  if node_values ~= '' or device_values ~= '' or #entry > 10 then
    local bytes = #node_values + #device_values
    for i = 11, #entry do bytes = bytes + #entry[i] end
    add_feed_entry(version, bytes, unpack(entry))
  end
end

-- Write everything. The feed names the `cause`.
function M.write_changes(cause)
  if next(records.freed_nodes) or records.inventory_changes.reasons then ledger.capacity = ledger.capacity + 1 end
  local version = ledger.next_version()
  for name in pairs(records.changed_nodes) do
    local node = records.nodes[name]
    if node then node[N.VERSION] = version end
  end
  local node_parts, node_values = packed_records(records.changed_nodes, records.nodes)
  local device_parts, device_values = packed_records(records.changed_devices, records.devices)
  add_changes_to_feed(cause, version, node_values, device_values)
  server.call_all('HSET', 'nodes', node_parts)
  server.call_all('HSET', 'devices', device_parts)
  server.call_all('HSET', 'leases', records.written_leases)
  server.call_all('ZADD', 'lease-nodes', records.lease_nodes)
  server.call_all('ZADD', 'gang-leases', records.gang_members)
  for at, pods in pairs(records.expiring) do
    call('ZADD', server.prefix .. 'expiring', at, encode({ledger.version, pods}))
  end
  for name in pairs(records.freed_nodes) do call('ZADD', server.prefix .. 'freed-nodes', ledger.capacity, name) end
  if records.inventory_changes.grew then call('HSET', server.prefix .. 'ledger', 'inventory_grew', ledger.capacity) end
  if records.inventory_changes.reasons then
    call('HSET', server.prefix .. 'ledger', 'reasons_changed', ledger.capacity)
  end
  if ledger.version ~= ledger.first_version or ledger.capacity ~= ledger.first_capacity then
    call('HSET', server.prefix .. 'ledger', 'version', ledger.version, 'capacity', ledger.capacity, 'feed_entry',
      ledger.feed_entry, 'fence_floor', ledger.fence_floor, 'node_number', ledger.node_number)
  end
  fair.write(records.changed_inventories)
  if ledger.has_quotas then quota.write() end
end

-- Nothing was freed, but pods may fit that did not before: raise the capacity number, so that no earlier
-- verdict counts as a later one.
function M.raise_capacity(cause)
  ledger.capacity = ledger.capacity + 1
  add_feed_entry(ledger.next_version(), 0, 'e', ledger.generation, 'c', ledger.capacity, 'w', cause, 'n', '', 'd', '')
  call('HSET', server.prefix .. 'ledger', 'version', ledger.version, 'capacity', ledger.capacity, 'feed_entry',
    ledger.feed_entry)
end

return M
