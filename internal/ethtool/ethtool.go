// SPDX-License-Identifier: Apache-2.0

// Package ethtool reads and changes what a network device does for its senders
// and receivers, and tells how many queues it has: the requests of ethtool(8) that
// XsPIN needs, by the ioctl of linux/ethtool.h.
//
// Devices are named in the network namespace of the calling thread.
package ethtool

import (
	"fmt"
	"runtime"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Feature is an offload that can be on or off.
type Feature struct {
	name     string
	get, set uint32 // requests with a struct ethtool_value; 0: it has a bit, and no requests of its own
}

// The features, by the names of ethtool -k.
var (
	TxChecksum = Feature{"tx-checksumming", unix.ETHTOOL_GTXCSUM, unix.ETHTOOL_STXCSUM}
	TSO        = Feature{"tcp-segmentation-offload", unix.ETHTOOL_GTSO, unix.ETHTOOL_STSO}
	GSO        = Feature{"generic-segmentation-offload", unix.ETHTOOL_GGSO, unix.ETHTOOL_SGSO}
	GRO        = Feature{"generic-receive-offload", unix.ETHTOOL_GGRO, unix.ETHTOOL_SGRO}
	UDPSegment = Feature{name: "tx-udp-segmentation"}
	// UDPForwarding has GRO join datagrams, whoever they are for.
	UDPForwarding = Feature{name: "rx-udp-gro-forwarding"}
)

func (f Feature) String() string { return f.name }

// Enabled tells whether a feature is on. A driver that does not know the question
// does not have the feature.
func (f Feature) Enabled(device string) (bool, error) {
	if f.get == 0 {
		bit, _, active, err := f.bit(device)
		return err == nil && active[bit/32]>>(bit%32)&1 != 0, err
	}
	value := struct{ cmd, data uint32 }{cmd: f.get}
	errno, err := request(device, unsafe.Pointer(&value))
	if err != nil {
		return false, err
	}
	if errno != 0 && errno != unix.EOPNOTSUPP {
		return false, fmt.Errorf("read %s of %s: %w", f, device, errno)
	}
	return errno == 0 && value.data != 0, nil
}

// Enable turns a feature on or off. That a device keeps it as it was, which the
// kernel does not report, is an error.
func (f Feature) Enable(device string, on bool) error {
	word := "off"
	value := struct{ cmd, data uint32 }{cmd: f.set}
	if on {
		word, value.data = "on", 1
	}
	ask := unsafe.Pointer(&value)
	if f.set == 0 {
		bit, size, _, err := f.bit(device)
		if err != nil {
			return err
		}
		bits := struct { // struct ethtool_sfeatures
			cmd, size uint32
			block     [featureWords]struct{ valid, requested uint32 }
		}{cmd: unix.ETHTOOL_SFEATURES, size: size}
		bits.block[bit/32].valid, bits.block[bit/32].requested = 1<<(bit%32), value.data<<(bit%32)
		ask = unsafe.Pointer(&bits)
	}
	errno, err := request(device, ask)
	if err != nil {
		return err
	}
	if errno != 0 {
		return fmt.Errorf("turn %s of %s %s: %w", f, device, word, errno)
	}
	if is, err := f.Enabled(device); err != nil {
		return err
	} else if is != on {
		return fmt.Errorf("turn %s of %s %s: the device has it fixed (see ethtool -k %s)", f, device, word, device)
	}
	return nil
}

const (
	featureWords = 8  // of 32 features each, more than there are
	featureNames = 4  // ETH_SS_FEATURES
	nameLen      = 32 // ETH_GSTRING_LEN
)

// bit returns which bit of its device's a feature has, in how many words, and those.
func (f Feature) bit(device string) (bit int, size uint32, active [featureWords]uint32, err error) {
	names := struct { // struct ethtool_gstrings
		cmd, set, n uint32
		name        [32 * featureWords][nameLen]byte
	}{cmd: unix.ETHTOOL_GSTRINGS, set: featureNames}
	bits := struct { // struct ethtool_gfeatures
		cmd, size uint32
		block     [featureWords]struct{ available, requested, active, never uint32 }
	}{cmd: unix.ETHTOOL_GFEATURES, size: featureWords}
	for _, ask := range []unsafe.Pointer{unsafe.Pointer(&names), unsafe.Pointer(&bits)} {
		errno, err := request(device, ask)
		if err != nil {
			return 0, 0, active, err
		}
		if errno != 0 {
			return 0, 0, active, fmt.Errorf("read %s of %s: %w", f, device, errno)
		}
	}
	for i, b := range bits.block {
		active[i] = b.active
	}
	for i := range min(names.n, uint32(len(names.name))) {
		if unix.ByteSliceToString(names.name[i][:]) == f.name {
			return int(i), bits.size, active, nil
		}
	}
	return 0, 0, active, fmt.Errorf("read %s of %s: this kernel does not know it", f, device)
}

// RxQueues returns how many receive queues of a device are in use, or 0 if its
// driver does not tell.
func RxQueues(device string) (int, error) {
	channels := struct { // struct ethtool_channels
		cmd                                 uint32
		maxRx, maxTx, maxOther, maxCombined uint32
		rx, tx, other, combined             uint32
	}{cmd: unix.ETHTOOL_GCHANNELS}
	errno, err := request(device, unsafe.Pointer(&channels))
	if err != nil {
		return 0, err
	}
	if errno != 0 && errno != unix.EOPNOTSUPP {
		return 0, fmt.Errorf("read the queues of %s: %w", device, errno)
	}
	return int(channels.rx + channels.combined), nil
}

// request makes one ioctl. Data points to the structure of the request, which
// begins with its number.
func request(device string, data unsafe.Pointer) (unix.Errno, error) {
	if len(device) >= unix.IFNAMSIZ {
		return 0, fmt.Errorf("device name %q is longer than %d bytes", device, unix.IFNAMSIZ-1)
	}
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return 0, fmt.Errorf("open a socket to ask about %s: %w", device, err)
	}
	defer unix.Close(fd)
	ifreq := struct {
		name [unix.IFNAMSIZ]byte
		data unsafe.Pointer
		_    [16]byte
	}{data: data}
	copy(ifreq.name[:], device)
	_, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), unix.SIOCETHTOOL, uintptr(unsafe.Pointer(&ifreq)))
	runtime.KeepAlive(data)
	return errno, nil
}
