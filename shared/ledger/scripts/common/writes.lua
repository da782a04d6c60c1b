-- Writing everything that changed, once, at the end of a script.

-- Delete removed nodes without leases. Fences continue from the highest deleted one.
local function delete_removed_nodes()
  for name in pairs(changed_nodes) do
    local node = nodes[name]
    if node and node[N_STATUS] == -1
      and call('ZCOUNT', PREFIX .. 'lease-nodes', node[N_NUMBER], node[N_NUMBER]) == 0 then
      local uuids = device_uuids(name)
      fetch('devices', uuids)
      for _, uuid in ipairs(uuids) do
        local device = devices[uuid]
        if device and device[D_NODE] == name and device[D_SHARES] == 0 then
          fence_floor = math.max(fence_floor, device[D_FENCE])
          devices[uuid] = false
          call('HDEL', PREFIX .. 'devices', uuid)
        end
      end
      nodes[name], freed_nodes[name] = false, nil
      call('DEL', PREFIX .. 'facts:' .. name)
      call('HDEL', PREFIX .. 'nodes', name)
      call('ZREM', PREFIX .. 'freed-nodes', name)
    end
  end
end

-- An entry names the one before it. IDs are times of the server, so that an entry that the server has lost
-- is never followed by another: readers of it begin with a snapshot.
-- Where entries are larger than usual, the feed is shorter.
local FEED_ENTRY_BYTES = 4096
local function add_feed_entry(version, bytes, ...)
  local most = ARGV[4]
  if bytes > FEED_ENTRY_BYTES then most = math.ceil(most * FEED_ENTRY_BYTES / bytes) end
  last_entry = call('XADD', PREFIX .. 'feed', 'MAXLEN', '~', most, '*', 'v', string.format('%.0f', version),
    'p', last_entry, ...)
end

-- Names with the packed values to be written; and all values joined, after the size of a packed array of
-- their lengths, and that array.
local function packed_values(changed, cache, value_of)
  local parts, joined, lengths = {}, {}, {}
  for name in pairs(changed) do
    local thing = cache[name]
    if thing then
      local value = value_of(thing)
      parts[#parts + 1] = name
      parts[#parts + 1] = value
      joined[#joined + 1] = value
      lengths[#joined] = #value
    end
  end
  if #joined == 0 then return parts, '' end
  local packed = encode(lengths)
  return parts, struct_pack('<I4', #packed) .. packed .. table.concat(joined)
end

local function add_changes_to_feed(cause, version, node_values, device_values)
  local entry = {'e', generation, 'c', capacity, 'w', cause, 'n', node_values, 'd', device_values}
  for name, is_there in pairs(changed_inventories) do
    if is_there then
      local stored = call('HMGET', PREFIX .. 'facts:' .. name, 'facts', 'devices', 'served')
      append(entry, 'f' .. name, stored[1] or '', 'g' .. name, stored[2] or '[]', 's' .. name,
        served_of(name, stored[3]))
      if state[12] then append(entry, 'r' .. name, repelling.terms_on(name)) end
    else
      append(entry, 'x' .. name, '')
    end
  end
  if node_values ~= '' or device_values ~= '' or #entry > 10 then
    local bytes = #node_values + #device_values
    for i = 11, #entry do bytes = bytes + #entry[i] end
    add_feed_entry(version, bytes, unpack(entry))
  end
end

-- Write everything. The feed names the `cause`.
local function write_changes(cause)
  if next(freed_nodes) or inventory_changes.reasons then capacity = capacity + 1 end
  local version = next_version()
  for name in pairs(changed_nodes) do
    if nodes[name] then nodes[name][N_VERSION] = version end
  end
  local node_parts, node_values = packed_values(changed_nodes, nodes, node_value)
  local device_parts, device_values = packed_values(changed_devices, devices, device_value)
  add_changes_to_feed(cause, version, node_values, device_values)
  call_all('HSET', 'nodes', node_parts)
  call_all('HSET', 'devices', device_parts)
  call_all('HSET', 'leases', written_leases)
  call_all('ZADD', 'lease-nodes', lease_nodes)
  call_all('ZADD', 'gang-leases', gang_members)
  for at, pods in pairs(expiring) do
    call('ZADD', PREFIX .. 'expiring', at, encode({last_version, pods}))
  end
  for name in pairs(freed_nodes) do call('ZADD', PREFIX .. 'freed-nodes', capacity, name) end
  if inventory_changes.grew then call('HSET', PREFIX .. 'ledger', 'inventory_grew', capacity) end
  if inventory_changes.reasons then call('HSET', PREFIX .. 'ledger', 'reasons_changed', capacity) end
  if last_version ~= first_version or capacity ~= first_capacity then
    call('HSET', PREFIX .. 'ledger', 'version', last_version, 'capacity', capacity, 'feed_entry',
      last_entry, 'fence_floor', fence_floor, 'node_number', last_node_number)
  end
  fair.write(changed_inventories)
  if quota.on then quota.write() end
end

-- Nothing was freed, but pods may fit that did not before: raise the capacity number, so that no earlier
-- verdict counts as a later one.
local function raise_capacity(cause)
  capacity = capacity + 1
  add_feed_entry(next_version(), 0, 'e', generation, 'c', capacity, 'w', cause, 'n', '', 'd', '')
  call('HSET', PREFIX .. 'ledger', 'version', last_version, 'capacity', capacity, 'feed_entry', last_entry)
end
