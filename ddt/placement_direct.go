// SPDX-License-Identifier: Apache-2.0

package ddt

// direct is Committed.Unpack.
type direct struct{ base }

func (p *direct) Place(slot, hpu int, mem []byte, origin, packet, first int64, stream []byte) (int64, error) {
	if err := p.who(slot, hpu, packet, first); err != nil {
		return 0, err
	}
	return p.c.Unpack(mem, origin, first, stream)
}
